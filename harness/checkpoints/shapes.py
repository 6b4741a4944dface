# SPDX-License-Identifier: Apache-2.0
"""The sizes of the checkpoints that are made here, under the keys of the golden vectors' config.json.

Needs neither torch nor Transformers.
"""

from __future__ import annotations

from typing import Any, Literal

Shape = Literal["tiny", "tiny16", "logos", "praxis"]
Dtype = Literal["float32", "bfloat16"]
Quantization = Literal["none", "fp8", "fp8_with_out_proj"]

_RELEASED = {
    "vocab_size": 65536,
    "head_dim": 64,
    "mamba_d_state": 128,
    "mamba_head_dim": 64,
    "latent_dim": 1024,
    "route_feature_dim": 256,
    "memory_dim": 256,
    "max_position_embeddings": 131072,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Small enough for two cores, with every kind of layer on either side of an attention layer.
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "attention_layer_indices": [1, 4],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "mamba_d_state": 64,
        "mamba_head_dim": 32,
        "mamba_ngroups": 4,
        "latent_dim": 128,
        "n_routed_experts": 16,
        "expert_intermediate_dim": 64,
        "route_feature_dim": 64,
        "memory_dim": 64,
        "max_position_embeddings": 4096,
    },
    # Widths that are multiples of 16 but not of 128: in_proj has 2624 rows, the router 208 columns.
    "tiny16": {
        "vocab_size": 512,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "attention_layer_indices": [2],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_state": 64,
        "mamba_head_dim": 16,
        "mamba_ngroups": 4,
        "latent_dim": 160,
        "n_routed_experts": 12,
        "expert_intermediate_dim": 112,
        "route_feature_dim": 48,
        "memory_dim": 80,
        "max_position_embeddings": 4096,
    },
    "logos": _RELEASED
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 20,
        "attention_layer_indices": [5, 10, 15],
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "mamba_ngroups": 10,
        "n_routed_experts": 192,
        "expert_intermediate_dim": 768,
    },
    "praxis": _RELEASED
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "attention_layer_indices": [4, 8],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_ngroups": 8,
        "n_routed_experts": 128,
        "expert_intermediate_dim": 512,
    },
}
SHARED: dict[str, Any] = {
    "attention_pass_lora_rank": 8,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "num_experts_per_tok": 4,
    "num_passes": 2,
    "max_passes": 5,
}
