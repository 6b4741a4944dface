# SPDX-License-Identifier: Apache-2.0
"""What follows from a router's logits, as one Triton kernel: the choice, and all that is told of it.

One program decides for one token. `router.chosen` is the same in plain PyTorch.

Letters: `T` tokens, `E` experts, `K` top-k, `R` route features.

Source: docs/model.md, forward pass 2.7 and 2.9.
"""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def _choose(
    logits_ptr,  # (T, E)
    selection_bias_ptr,  # (E,)
    embeddings_ptr,  # (E, R)
    history_ptr,  # (T, R)
    routing_ptr,  # (T, 2K): weights, then experts
    new_history_ptr,  # (T, R)
    coalition_ptr,  # (T, R)
    entropy_ptr,  # (T,)
    confidence_ptr,  # (T,)
    entropy_scale,  # 1 / ln(E)
    E: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, feature = tl.arange(0, EXPERTS), tl.arange(0, FEATURES)
    exists, in_features = expert < E, feature < R
    logits = tl.load(logits_ptr + token * E + expert, mask=exists, other=float("-inf"))
    bias = tl.load(selection_bias_ptr + expert, mask=exists, other=0.0)
    history = tl.load(history_ptr + token * R + feature, mask=in_features, other=0.0)

    biased, chosen, chosen_logits, largest = logits + bias, (), (), float("-inf")
    for _ in tl.static_range(TOP_K):
        # No expert beyond the last, even where the logits are not numbers.
        best = tl.minimum(tl.argmax(biased, axis=0), E - 1)
        logit = tl.sum(tl.where(expert == best, logits, 0.0), axis=0)
        biased = tl.where(expert == best, float("-inf"), biased)
        chosen, chosen_logits = chosen + (best,), chosen_logits + (logit,)
        largest = tl.maximum(largest, logit)
    rows, total, weights = (), 0.0, ()
    for k in tl.static_range(TOP_K):
        row_ptr = embeddings_ptr + chosen[k] * R + feature
        rows = rows + (tl.load(row_ptr, mask=in_features, other=0.0),)
        weight = tl.exp(chosen_logits[k] - largest)
        weights = weights + (weight,)
        total += weight
    coalition = tl.zeros([FEATURES], tl.float32)
    for k in tl.static_range(TOP_K):
        share = weights[k] / total
        tl.store(routing_ptr + token * 2 * TOP_K + k, share)
        tl.store(routing_ptr + token * 2 * TOP_K + TOP_K + k, chosen[k].to(tl.float32))
        coalition += share * rows[k].to(tl.float32)
    tl.store(coalition_ptr + token * R + feature, coalition, mask=in_features)
    tl.store(
        new_history_ptr + token * R + feature, 0.5 * history + 0.5 * coalition, mask=in_features
    )

    peak = tl.max(logits, axis=0)
    exponentials = tl.exp(logits - peak)
    probabilities = exponentials / tl.sum(exponentials, axis=0)
    surprise = probabilities * tl.log(tl.maximum(probabilities, 1e-9))
    tl.store(entropy_ptr + token, -tl.sum(surprise, axis=0) * entropy_scale)
    tl.store(confidence_ptr + token, tl.max(probabilities, axis=0))


def choose(
    logits: torch.Tensor,
    selection_bias: torch.Tensor,
    expert_embeddings: torch.Tensor,
    history: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `router.choose`."""
    tokens, experts = logits.shape
    features = expert_embeddings.shape[1]
    routing = logits.new_empty((tokens, 2 * top_k))
    new_history, coalition = torch.empty_like(history), torch.empty_like(history)
    entropy, confidence = logits.new_empty((tokens, 1)), logits.new_empty((tokens, 1))
    if tokens > 0:
        _choose[(tokens,)](
            logits,
            selection_bias,
            expert_embeddings,
            history,
            routing,
            new_history,
            coalition,
            entropy,
            confidence,
            1.0 / math.log(experts),
            E=experts,
            R=features,
            TOP_K=top_k,
            EXPERTS=triton.next_power_of_2(experts),
            FEATURES=triton.next_power_of_2(features),
            num_warps=1,
        )
    return routing, new_history, coalition, entropy, confidence
