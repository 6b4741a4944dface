# SPDX-License-Identifier: Apache-2.0
"""Attention without positional encoding, run once per pass over one set of weights.

A KV cache belongs to an `Attention` object, so there is one per pass, each under its own
layer name; projections are shared, and a pass differs by a gated low-rank term on q, k, v.
The in-tree precedent is vllm/model_executor/models/zamba2.py:176-230 (vLLM 0.31.0).

Source: docs/model.md, forward pass 2.4.
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import CacheConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig

from vllm_metis.config import Metis16Config
from vllm_metis.model.few_tokens import FeatureInputs, project, project_with_features


class PassAttention(Attention):
    """The attention of one pass over its own cache.

    vLLM finishes these after all other layers, when weights were loaded and, unlike the model
    itself, when they were reloaded (vllm/model_executor/model_loader/reload/layerwise.py): so
    `after_loading` is where what depends on weights is computed again.
    """

    after_loading: Callable[[], None] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.after_loading is not None:
            self.after_loading()


class Metis16Attention(nn.Module):
    """Causal grouped-query attention with per-pass low-rank q, k, v; no biases, no q/k norm."""

    gates: torch.Tensor

    def __init__(
        self,
        config: Metis16Config,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_size = heads // tp_size * config.head_dim
        self.kv_size = kv_heads // tp_size * config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            heads,
            kv_heads,
            bias=False,
            quant_config=quant_config,
            return_bias=False,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * config.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            return_bias=False,
            prefix=f"{prefix}.o_proj",
        )
        rank = config.attention_pass_lora_rank
        self.pass_lora_down = ReplicatedLinear(
            config.hidden_size,
            rank,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.pass_lora_down",
        )
        # Rows are ordered and split over ranks like those of qkv_proj, to which it is added.
        self.pass_lora_up = QKVParallelLinear(
            rank,
            config.head_dim,
            heads,
            kv_heads,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.pass_lora_up",
        )
        self.pass_gates = nn.Parameter(torch.empty(config.num_passes), requires_grad=False)
        gates = torch.full((config.num_passes,), float("nan"), dtype=torch.float32)
        self.register_buffer("gates", gates, persistent=False)
        # No quant_config: no release stores KV scales, and one that is quantized would
        # otherwise expect them for every cache layer.
        self.passes = nn.ModuleList(
            PassAttention(
                heads // tp_size,
                config.head_dim,
                scale=config.head_dim**-0.5,
                num_kv_heads=kv_heads // tp_size,
                cache_config=cache_config,
                prefix=f"{prefix}.attn_pass{p}",
            )
            for p in range(config.num_passes)
        )

    def finalize(self) -> None:
        """Compute tanh of the pass gates from the loaded weights."""
        self.gates.copy_(self.pass_gates.float().tanh())

    def forward(
        self, hidden_states: torch.Tensor, inputs: FeatureInputs, pass_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention output of one pass, (T, D), and the router's features, (T, R).

        Args:
            hidden_states: (T, D), model dtype.
        """
        low_rank = self.pass_lora_down(hidden_states)
        low_rank = (self.gates[pass_index] * low_rank.float()).to(low_rank.dtype)
        qkv, features = project_with_features(self.qkv_proj, hidden_states, inputs)
        qkv = qkv + self.pass_lora_up(low_rank)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        return project(self.o_proj, self.passes[pass_index](q, k, v)), features
