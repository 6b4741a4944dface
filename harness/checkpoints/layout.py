# SPDX-License-Identifier: Apache-2.0
"""The release's tensors: names, shapes, which are FP32, and how a random checkpoint draws them.

Names are the training runtime's. The distributions are chosen so that every path of the forward
pass matters: no gate, bias, per-pass table or low-rank correction is near zero, and a third of the
continuation logits reach their clamp. Yet the streams stay below 10, the logits have a standard
deviation of about 2, and greedy decoding does not settle on one token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.reference.configuration_metis16 import Metis16Config

Distribution = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True)
class ReleasedTensor:
    """One tensor of a checkpoint; `fp32` ones stay FP32 whatever the model dtype."""

    name: str
    shape: tuple[int, ...]
    distribution: Distribution
    fp32: bool = False


def draw(spec: ReleasedTensor, seed: int) -> Tensor:
    """Return the tensor in FP32, a function of the seed and the tensor's name alone.

    Every processor with AVX2 draws the same bits, so that runs on two machines can be compared.

    What the model keeps in its own dtype is rounded to BF16, so that the checkpoints of both dtypes
    hold the same model.
    """
    digest = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
    tensor = spec.distribution(spec.shape, generator)
    return tensor if spec.fp32 else tensor.bfloat16().float()


def release_layout(config: Metis16Config) -> Iterator[ReleasedTensor]:
    """Yield every tensor of the release, unused ones and the copied `lm_head.weight` included."""
    D, R, M = config.hidden_size, config.route_feature_dim, config.memory_dim
    streams, passes = config.n_streams, config.max_passes
    # The logits' standard deviation is about 2: a normalized row of length sqrt(D) meets this.
    yield ReleasedTensor("embedding.weight", (config.vocab_size, D), normal(2 / math.sqrt(D)))
    # Larger, they would drown the tokens, and every position would say the same.
    yield ReleasedTensor("stream_embeddings", (streams, D), normal(0.1))
    yield ReleasedTensor("pass_embeddings", (passes, config.mhc_pass_embedding_dim), normal(0.3))
    yield from _depth_memory(config, D, R, M)
    yield from _linear("continuation.hidden", R, 3 * D + R, bias=True, fp32=True)
    yield from _linear("continuation.output", 1, R, gain=8.0, bias=True, fp32=True)
    yield ReleasedTensor("depth_budget.multiplier", (), normal(0.0), fp32=True)
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        for connection in ("mixer_connection", "moe_connection"):
            yield from _connection(f"{layer}.{connection}", config)
        if index in config.attention_layer_indices:
            yield from _attention(f"{layer}.mixer", config)
        else:
            yield from _mamba(f"{layer}.mixer.impl.mixer", config)
        yield from _moe(f"{layer}.moe", config)
    yield ReleasedTensor("final_norm.weight", (D,), normal(0.1, 1.0))


def _depth_memory(config: Metis16Config, D: int, R: int, M: int) -> Iterator[ReleasedTensor]:
    at = "depth_memory"
    for name, rows, columns in (
        ("state_write", M, D),
        ("metadata_write", M, R + 4),
        ("query", M, D),
        ("key", M, M),
        ("value", M, M),
        ("route_projection", R, 3 * D + R),
    ):
        yield from _linear(f"{at}.{name}", rows, columns, bias=True)
    # What is written is read back at every later layer: with a gain of 1 the streams explode.
    yield from _linear(f"{at}.output", D, M, gain=0.5, bias=True)
    anchors = len(config.attention_layer_indices) + 1
    yield ReleasedTensor(f"{at}.pass_embeddings", (config.max_passes, M), normal(0.3))
    yield ReleasedTensor(f"{at}.anchor_embeddings", (anchors, M), normal(0.3))
    yield ReleasedTensor(f"{at}.stream_gate", (config.n_streams, D), normal(1.0))
    yield ReleasedTensor(f"{at}.stream_gate_bias", (config.n_streams,), normal(0.4, -1.0))


def _connection(at: str, config: Metis16Config) -> Iterator[ReleasedTensor]:
    streams = config.n_streams
    yield ReleasedTensor(f"{at}.norm.weight", (config.hidden_size,), normal(0.1, 1.0))
    yield ReleasedTensor(f"{at}.read_logits", (streams,), normal(0.6))
    yield ReleasedTensor(f"{at}.write_logits", (streams,), normal(0.6))
    yield ReleasedTensor(f"{at}.mix_logits", (streams, streams), mostly_diagonal)
    controls = config.mhc_pass_embedding_dim
    yield from _linear(f"{at}.controller", streams * (streams + 2), controls, bias=True)


def _attention(at: str, config: Metis16Config) -> Iterator[ReleasedTensor]:
    D, rank = config.hidden_size, config.attention_pass_lora_rank
    q = config.num_attention_heads * config.head_dim
    qkv = q + 2 * config.num_key_value_heads * config.head_dim
    yield from _linear(f"{at}.qkv", qkv, D)
    yield from _linear(f"{at}.out", D, q)
    yield from _linear(f"{at}.pass_lora_down", rank, D)
    yield from _linear(f"{at}.pass_lora_up", qkv, rank)
    yield ReleasedTensor(f"{at}.pass_gates", (config.max_passes,), normal(1.0))


def _mamba(at: str, config: Metis16Config) -> Iterator[ReleasedTensor]:
    D, heads = config.hidden_size, config.mamba_heads
    inner, conv = config.d_inner, config.conv_dim
    yield from _linear(f"{at}.in_proj", inner + conv + heads, D)
    yield ReleasedTensor(f"{at}.conv1d.weight", (conv, 1, config.mamba_d_conv), normal(0.4))
    yield ReleasedTensor(f"{at}.conv1d.bias", (conv,), normal(0.1))
    yield ReleasedTensor(f"{at}.dt_bias", (heads,), inverse_softplus_of_step, fp32=True)
    yield ReleasedTensor(f"{at}.A_log", (heads,), log_of_decay, fp32=True)
    yield ReleasedTensor(f"{at}.D", (heads,), normal(0.2, 1.0), fp32=True)
    yield ReleasedTensor(f"{at}.norm.weight", (inner,), normal(0.1, 1.0))
    yield from _linear(f"{at}.out_proj", D, inner)


def _moe(at: str, config: Metis16Config) -> Iterator[ReleasedTensor]:
    D, R, latent = config.hidden_size, config.route_feature_dim, config.latent_dim
    E, width = config.n_routed_experts, config.expert_intermediate_dim
    yield from _linear(f"{at}.latent_down", latent, D)
    yield from _linear(f"{at}.latent_up", D, latent)
    yield ReleasedTensor(f"{at}.expert_embeddings", (E, R), normal(0.3))
    # Sharp, so that BF16 rounding seldom swaps experts, and the fourth one matters little.
    yield from _linear(f"{at}.expert_router", E, latent + R, gain=3.0, bias=True, fp32=True)
    yield ReleasedTensor(f"{at}.selection_bias", (E,), normal(0.5), fp32=True)
    yield from _linear(f"{at}.k_router", config.max_routed_k, latent + R, bias=True, fp32=True)
    yield ReleasedTensor(f"{at}.k_budget.multiplier", (), normal(0.0), fp32=True)
    for expert in ("shared_expert", *(f"local_experts.{e}" for e in range(E))):
        yield from _linear(f"{at}.{expert}.gate_up", 2 * width, latent)
        yield from _linear(f"{at}.{expert}.down", latent, width)


def _linear(
    at: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = False, fp32: bool = False
) -> Iterator[ReleasedTensor]:
    weight = normal(gain / math.sqrt(columns))
    yield ReleasedTensor(f"{at}.weight", (rows, columns), weight, fp32)
    if bias:
        yield ReleasedTensor(f"{at}.bias", (rows,), normal(0.1), fp32)


def normal(std: float, mean: float = 0.0) -> Distribution:
    return lambda shape, generator: torch.randn(shape, generator=generator).mul_(std).add_(mean)


def mostly_diagonal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Streams mostly keep to themselves, as in a trained model."""
    return torch.randn(shape, generator=generator).mul_(0.5) + 2 * torch.eye(*shape)


# The next two are computed in FP64: a logarithm in FP32 has other last bits on another processor.


def inverse_softplus_of_step(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """dt_bias such that softplus gives steps spread evenly in the logarithm over 0.001 to 0.1."""
    step = 10 ** (torch.rand(shape, generator=generator).double() * 2 - 3)
    return step.expm1().log().float()


def log_of_decay(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A_log for decays spread evenly over 1 to 16."""
    return (torch.rand(shape, generator=generator).double() * 15 + 1).log().float()
