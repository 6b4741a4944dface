# SPDX-License-Identifier: Apache-2.0
"""The smallest model with both kinds of layers; widths differ so that no two are mistaken."""

MICRO = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "attention_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_d_state": 24,
    "mamba_head_dim": 16,
    "mamba_ngroups": 2,
    "latent_dim": 40,
    "n_routed_experts": 5,
    "expert_intermediate_dim": 28,
    "route_feature_dim": 20,
    "memory_dim": 12,
    "max_position_embeddings": 512,
}
