# SPDX-License-Identifier: Apache-2.0
"""What a router decides of its logits, and what is told of it, in plain PyTorch and as an operator.

The choice feeds three things besides the experts (coalition, entropy, confidence), so it is made
here, and handed to vLLM's experts as data in place of logits (`pack`, `unpack`): the experts
neither score nor select again.

`choose` is opaque to the compiler: CUDA runs `router_kernel`, the CPU `chosen`, of which the
functions before it are the steps; `VLLM_METIS_FUSED=0` makes CUDA run `chosen` too.

Letters: `T` tokens, `E` experts, `K` top-k, `R` route features.

Source: docs/model.md, forward pass 2.7 and 2.9.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_metis.model.switches import fused


class Routing(NamedTuple):
    """What is told of the routing of one layer, float32.

    Attributes:
        history: (T, R), half of what it was and half of the coalition.
        coalition: (T, R), weighted mean of the chosen experts' embeddings.
        entropy: (T, 1), of the unbiased distribution over all experts, 0 to 1.
        confidence: (T, 1), its largest probability.
    """

    history: torch.Tensor
    coalition: torch.Tensor
    entropy: torch.Tensor
    confidence: torch.Tensor


def route(
    latent: torch.Tensor, route_features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the router's logits of `[latent; route_features]`, (T, E), float32.

    Args:
        latent: (T, latent width); route_features: (T, R); model dtype.
        weight: (E, latent width + R); bias: (E,); float32.
    """
    width = latent.shape[-1]
    # Two products, not one of the concatenation: in an FP32 model the compiler would write
    # the latent straight into the concatenated buffer, and the experts need it contiguous.
    logits = nn.functional.linear(route_features.float(), weight[:, width:], bias)
    return logits + nn.functional.linear(latent.float(), weight[:, :width])


def select(
    logits: torch.Tensor, selection_bias: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by biased logits, weigh by the softmax of the chosen unbiased ones.

    Args:
        logits: (T, E), float32.
        selection_bias: (E,), float32.

    Returns:
        weights (T, K), float32, summing to one, and experts (T, K), int64.
    """
    experts = (logits + selection_bias).topk(top_k, dim=-1).indices
    return logits.gather(-1, experts).softmax(-1), experts


def describe(
    logits: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    expert_embeddings: torch.Tensor,
    history: torch.Tensor,
) -> Routing:
    """Return what the depth memory and the next layers learn of a routing.

    Args:
        logits: (T, E), float32, unbiased.
        weights, experts: (T, K), from `select`.
        expert_embeddings: (E, R), model dtype.
        history: (T, R), float32, of the layers before.
    """
    coalition = (weights[..., None] * expert_embeddings[experts].float()).sum(1)
    probabilities = logits.softmax(-1)
    log = probabilities.clamp(min=1e-9).log()
    entropy = -(probabilities * log).sum(-1, keepdim=True) / math.log(logits.shape[-1])
    history = 0.5 * history + 0.5 * coalition
    return Routing(history, coalition, entropy, probabilities.amax(-1, keepdim=True))


def pack(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Put a choice into one float32 tensor (T, 2K), the shape-free place of router logits."""
    return torch.cat([weights, experts.to(weights.dtype)], dim=-1)


def unpack(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `custom_routing_function`: read back what `pack` wrote; numbers under 2²⁴ are exact."""
    weights, experts = gating_output.split(topk, dim=-1)
    return weights.contiguous(), experts.to(torch.int32)


def chosen(
    logits: torch.Tensor,
    selection_bias: torch.Tensor,
    expert_embeddings: torch.Tensor,
    history: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `choose`; the five in a row."""
    weights, experts = select(logits, selection_bias, top_k)
    told = describe(logits, weights, experts, expert_embeddings, history)
    return pack(weights, experts), *told


def choose(
    logits: torch.Tensor,
    selection_bias: torch.Tensor,
    expert_embeddings: torch.Tensor,
    history: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, Routing]:
    """Return the experts chosen, (T, 2K), as `pack` puts them, and what is told of them.

    Args:
        logits: (T, E), float32, unbiased.
        selection_bias: (E,), float32.
        expert_embeddings: (E, R), model dtype.
        history: (T, R), float32, of the layers before.
    """
    packed, *told = torch.ops.vllm.metis_choose(
        logits, selection_bias, expert_embeddings, history, top_k
    )
    return packed, Routing(*told)


def _shapes(
    logits: torch.Tensor,
    bias: torch.Tensor,
    embeddings: torch.Tensor,
    history: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, ...]:
    tokens = logits.shape[0]
    features = [torch.empty_like(history) for _ in range(2)]
    scalars = [logits.new_empty((tokens, 1)) for _ in range(2)]
    return logits.new_empty((tokens, 2 * k)), *features, *scalars


def _register() -> None:
    form: Any = chosen
    if fused():
        from vllm_metis.model.router_kernel import choose as form
    direct_register_custom_op("metis_choose", form, fake_impl=_shapes)


_register()
