# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a configuration implies: its name, its shape, and what may stand for it.

The one place that knows what tensor parallelism splits, what FP8 releases keep in FP8, and how
many bytes a tensor takes for it. Names are vLLM's, with projections packed and experts apart;
`names.MAPPER` brings those of a checkpoint to them. Needs neither torch nor vLLM.

Source: docs/model.md, "Checkpoint tensors" and "FP8 checkpoints".
"""

import enum
import math
from dataclasses import dataclass, replace
from typing import Any

from vllm_metis.config import Metis16Config

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Parameters that a checkpoint may hold whole or in parts, in the order of their rows."""

PADDED_WIDTH = 16
"""Multiple, per rank, to which expert widths are padded when a TP size does not divide them."""

MODEL_DTYPES = {"fp32": 4, "bf16": 2, "fp8": 2}
"""Bytes of a value in the model dtype; an FP8 release keeps all but its listed modules in BF16."""


class Split(enum.Enum):
    """What tensor parallelism gives a rank of a tensor."""

    WHOLE = enum.auto()
    ROWS = enum.auto()
    COLUMNS = enum.auto()


class Float8(enum.Enum):
    """Whether FP8, with a scale per row, may stand in a tensor's place."""

    REFUSED = enum.auto()
    ACCEPTED = enum.auto()  # but FP8 releases keep it as trained
    RELEASED = enum.auto()


@dataclass(frozen=True)
class TensorSpec:
    """What a checkpoint must hold under one name.

    Attributes:
        shape: As stored, before tensor parallelism.
        fp32: Whether the model defines it in FP32, so that nothing narrower will do.
        rows_at_least: Whether more rows than `shape` has may follow (tables per pass that
            were trained for more passes).
        float8: Whether it may be FP8, and is in FP8 releases.
        split: What each rank holds of it.
    """

    shape: tuple[int, ...]
    fp32: bool = False
    rows_at_least: bool = False
    float8: Float8 = Float8.REFUSED
    split: Split = Split.WHOLE

    @property
    def quantizable(self) -> bool:
        return self.float8 is not Float8.REFUSED

    def accepts(self, shape: tuple[int, ...]) -> bool:
        if self.rows_at_least:
            return shape[1:] == self.shape[1:] and len(shape) > 0 and shape[0] >= self.shape[0]
        return shape == self.shape

    def nbytes(self, dtype: str, tp: int = 1) -> int:
        """Return what it takes on one of `tp` ranks, its scales included.

        Args:
            dtype: One of `MODEL_DTYPES`; `fp8` is an FP8 release.
        """
        width = 1 if self._is_float8(dtype) else 4 if self.fp32 else MODEL_DTYPES[dtype]
        ranks = 1 if self.split is Split.WHOLE else tp
        return math.prod(self.shape) * width // ranks + self.scale_bytes(dtype, tp)

    def scale_bytes(self, dtype: str, tp: int = 1) -> int:
        """Return what its FP32 scales take on one of `tp` ranks: one a row, none unless it is FP8."""
        if not self._is_float8(dtype):
            return 0
        # Columns that are split have the same rows, so the same scales, on every rank.
        return 4 * self.shape[0] // (tp if self.split is Split.ROWS else 1)

    def _is_float8(self, dtype: str) -> bool:
        return dtype == "fp8" and self.float8 is Float8.RELEASED


def checkpoint_tensors(config: Metis16Config) -> dict[str, TensorSpec]:
    """Return every tensor of a checkpoint by its name after `names.MAPPER`, packed and unstacked."""
    hidden, features, width = config.hidden_size, config.route_feature_dim, config.memory_dim
    streams, passes = config.num_streams, config.num_passes
    latent, expert = config.moe_latent_size, config.moe_intermediate_size
    shared = expert * config.num_shared_experts
    heads, inner, conv = config.mamba_num_heads, config.mamba_d_inner, config.conv_dim
    q = config.num_attention_heads * config.head_dim
    qkv = q + 2 * config.num_key_value_heads * config.head_dim

    def linear(name: str, rows: int, columns: int, **kind: Any) -> dict[str, TensorSpec]:
        return {f"{name}.weight": TensorSpec((rows, columns), **kind)}

    def biased(name: str, rows: int, columns: int, **kind: Any) -> dict[str, TensorSpec]:
        return linear(name, rows, columns, **kind) | {f"{name}.bias": TensorSpec((rows,), **kind)}

    def connection(name: str) -> dict[str, TensorSpec]:
        return {
            f"{name}.norm.weight": TensorSpec((hidden,)),
            f"{name}.read_logits": TensorSpec((streams,)),
            f"{name}.write_logits": TensorSpec((streams,)),
            f"{name}.mix_logits": TensorSpec((streams, streams)),
        } | biased(f"{name}.controller", streams * (streams + 2), config.pass_embedding_dim)

    def attention(name: str) -> dict[str, TensorSpec]:
        rank = config.attention_pass_lora_rank
        return {
            **linear(f"{name}.qkv_proj", qkv, hidden, split=Split.ROWS, float8=Float8.RELEASED),
            **linear(f"{name}.o_proj", hidden, q, split=Split.COLUMNS, float8=Float8.RELEASED),
            **linear(f"{name}.pass_lora_down", rank, hidden),
            **linear(f"{name}.pass_lora_up", qkv, rank, split=Split.ROWS),
            f"{name}.pass_gates": TensorSpec((passes,), rows_at_least=True),
        }

    def mamba(name: str) -> dict[str, TensorSpec]:
        rows, per_head = inner + conv + heads, TensorSpec((heads,), fp32=True, split=Split.ROWS)
        return {
            **linear(f"{name}.in_proj", rows, hidden, split=Split.ROWS, float8=Float8.RELEASED),
            f"{name}.conv1d.weight": TensorSpec((conv, 1, config.mamba_d_conv), split=Split.ROWS),
            f"{name}.conv1d.bias": TensorSpec((conv,), split=Split.ROWS),
            f"{name}.dt_bias": per_head,
            f"{name}.A": per_head,
            f"{name}.D": per_head,
            f"{name}.norm.weight": TensorSpec((inner,), split=Split.ROWS),
            **linear(
                f"{name}.out_proj", hidden, inner, split=Split.COLUMNS, float8=Float8.ACCEPTED
            ),
        }

    def swiglu(name: str, between: int, **kind: Any) -> dict[str, TensorSpec]:
        return {
            **linear(f"{name}.gate_up_proj", 2 * between, latent, split=Split.ROWS, **kind),
            **linear(f"{name}.down_proj", latent, between, split=Split.COLUMNS, **kind),
        }

    def moe(name: str) -> dict[str, TensorSpec]:
        experts: dict[str, TensorSpec] = {}
        for e in range(config.num_experts):
            experts |= swiglu(f"{name}.experts.{e}", expert, float8=Float8.RELEASED)
        return {
            **linear(f"{name}.latent_down", latent, hidden),
            **linear(f"{name}.latent_up", hidden, latent),
            f"{name}.expert_embeddings": TensorSpec((config.num_experts, features)),
            **biased(f"{name}.expert_router", config.num_experts, latent + features, fp32=True),
            f"{name}.selection_bias": TensorSpec((config.num_experts,), fp32=True),
            **swiglu(f"{name}.shared_expert", shared),
            **experts,
        }

    memory = "model.depth_memory"
    tensors = {
        **linear("model.embed_tokens", config.vocab_size, hidden, split=Split.ROWS),
        "model.stream_embeddings": TensorSpec((streams, hidden)),
        "model.pass_embeddings": TensorSpec(
            (passes, config.pass_embedding_dim), rows_at_least=True
        ),
        **biased(f"{memory}.state_write", width, hidden),
        **biased(f"{memory}.metadata_write", width, features + 4),
        **biased(f"{memory}.query", width, hidden),
        **biased(f"{memory}.key", width, width),
        **biased(f"{memory}.value", width, width),
        **biased(f"{memory}.output", hidden, width),
        f"{memory}.route_weight": TensorSpec((features, 3 * hidden + features)),
        f"{memory}.route_bias": TensorSpec((features,)),
        f"{memory}.pass_embeddings": TensorSpec((passes, width), rows_at_least=True),
        f"{memory}.anchor_embeddings": TensorSpec((config.num_anchors, width)),
        f"{memory}.stream_gate": TensorSpec((streams, hidden)),
        f"{memory}.stream_gate_bias": TensorSpec((streams,)),
        **biased("model.continuation.hidden", features, 3 * hidden + features, fp32=True),
        **biased("model.continuation.output", 1, features, fp32=True),
        "model.final_norm.weight": TensorSpec((hidden,)),
        **linear("lm_head", config.vocab_size, hidden, split=Split.ROWS),
    }
    for i, kind in enumerate(config.layers_block_type):
        layer = f"model.layers.{i}"
        tensors |= connection(f"{layer}.mixer_connection")
        tensors |= connection(f"{layer}.moe_connection")
        if kind == "attention":
            tensors |= attention(f"{layer}.mixer")
        else:
            tensors |= mamba(f"{layer}.mixer.mamba")
        tensors |= moe(f"{layer}.moe")
    return tensors


def parts_of(config: Metis16Config, name: str, tensor: TensorSpec) -> dict[str, TensorSpec]:
    """Return the parts that may stand in for a packed tensor, none where it is not packed."""
    for packed, parts in PACKED.items():
        if f".{packed}." not in name or "lora" in name:
            continue
        if packed == "qkv_proj":
            kv = config.num_key_value_heads * config.head_dim
            rows = [tensor.shape[0] - 2 * kv, kv, kv]
        else:
            rows = [tensor.shape[0] // len(parts)] * len(parts)
        return {
            name.replace(packed, part): replace(tensor, shape=(count, *tensor.shape[1:]))
            for part, count in zip(parts, rows, strict=True)
        }
    return {}


def padded_expert_width(config: Metis16Config, tp_size: int) -> int:
    """Return the expert width that vLLM is given: padded with zeros where TP does not divide it."""
    width = config.moe_intermediate_size
    if width % tp_size == 0:
        return width
    step = PADDED_WIDTH * tp_size
    return -(-width // step) * step
