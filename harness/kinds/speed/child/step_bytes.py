# SPDX-License-Identifier: Apache-2.0
"""The least number of bytes that a step of the model must move: what bounds its speed.

One formula, for decode steps and prefills alike. Activations are left out: they are small beside the
weights, and fused kernels keep most of them on the chip. Needs neither torch nor vLLM.

Source: docs/model.md, "Geometry" and "Caches"; vllm_metis/checkpoint/specs.py for the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metis.checkpoint.specs import checkpoint_tensors
from vllm_metis.cli.plan import plan
from vllm_metis.config import Metis16Config

_WIDTHS = {"fp32": 4, "bf16": 2, "fp8": 2}


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step reads and writes."""

    weights: int
    kv: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.states


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """Return how many experts of a layer `tokens` choose, expected where routing is even."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def step_bytes(
    config: Metis16Config, dtype: str, streams: int, new_tokens: int, context: float
) -> StepBytes:
    """Return the bytes of one step over `streams` sequences.

    With `T = streams * new_tokens`, P passes and E experts of which a token takes k::

        weights = P * (layers without routed experts)      both passes read them: no cache holds them
                + P * L * E (1 - (1 - k/E)^T) * (one expert)
                + (head, depth memory, final norm)         once
                + T * (one row of the embedding)
        kv      = streams * (context + new_tokens) * (KV of a token)
        states  = streams * (conv and SSM states) * (2, or 1 where there is none to read)

    Args:
        dtype: `fp32`, `bf16`, or `fp8` for BF16 with the modules in FP8 that releases keep so.
        new_tokens: of each sequence in this step, 1 for decoding.
        context: tokens of each sequence before the step, on average; 0 for a whole prefill.
    """
    passes, tokens = config.num_passes, streams * new_tokens
    once = of_layers = of_experts = 0
    for name, tensor in checkpoint_tensors(config).items():
        size = tensor.nbytes(dtype)
        if ".experts." in name:
            of_experts += size
        elif ".layers." in name:
            of_layers += size
        elif not name.startswith(("model.embed_tokens.", "model.continuation.")):
            once += size
        elif name.startswith("model.continuation."):
            once += (passes - 1) * size  # nobody reads what it says of the last pass
    share = distinct_experts(config.num_experts, config.num_experts_per_tok, tokens)
    weights = once + passes * (of_layers + of_experts * share / config.num_experts)
    weights += tokens * config.hidden_size * _WIDTHS[dtype]
    return with_caches(config, dtype, round(weights), streams, new_tokens, context)


def with_caches(
    config: Metis16Config, dtype: str, weights: int, streams: int, new_tokens: int, context: float
) -> StepBytes:
    """Return the bytes of a step that reads so many of weights; see `step_bytes`."""
    held = plan(config, memory_bytes=0, max_model_len=1, dtype=dtype)
    return StepBytes(
        weights=weights,
        kv=round(streams * (context + new_tokens) * held.kv_bytes_per_token),
        states=streams * held.state_bytes * (2 if context else 1),
    )
