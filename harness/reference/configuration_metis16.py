# SPDX-License-Identifier: Apache-2.0
"""The reference's configuration: each key of config.json that the model needs, in every spelling.

Checkpoints carry this file unchanged, as part of their remote code; hence its name. It shares
nothing with the plugin's configuration.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "attention_layer_indices",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_pass_lora_rank",
    "mamba_expand",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_head_dim",
    "mamba_ngroups",
    "latent_dim",
    "n_routed_experts",
    "expert_intermediate_dim",
    "num_experts_per_tok",
    "num_passes",
    "max_passes",
    "route_feature_dim",
    "memory_dim",
)
# What every known model has alike.
CONSTANTS = {
    "mamba_chunk_size": 256,
    "n_streams": 4,
    "mhc_pass_embedding_dim": 64,
    "mhc_sinkhorn_iterations": 8,
    "n_shared_experts": 1,
    "max_routed_k": 8,
    "continuation_logit_limit": 4.0,
    "rms_norm_eps": 1e-6,
    "mamba_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
# The other names that a release may use: what Transformers' models usually call a field, and what
# the training manifest calls it, where that differs from the names above.
KEY_SPELLINGS = {
    "transformers": {
        "mamba_ngroups": "mamba_n_groups",
        "latent_dim": "moe_latent_size",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "expert_intermediate_dim": "moe_intermediate_size",
    },
    "manifest": {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "max_seq_len",
    },
}


class Metis16Config(PreTrainedConfig):
    """Sizes of a Metis-1.6 model, each read under any of its spellings.

    Raises:
        ValueError: a key missing, or given twice with different values, or sizes that contradict
            each other; the message lists them all.
    """

    model_type = "metis16"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        alias: key for spelling in KEY_SPELLINGS.values() for key, alias in spelling.items()
    }

    def __init__(self, **kwargs: Any) -> None:
        faults = []
        for key in (*REQUIRED_KEYS, *CONSTANTS):
            aliases = [alias for alias, name in self.attribute_map.items() if name == key]
            given = {name: kwargs.pop(name) for name in (key, *aliases) if name in kwargs}
            value = next(iter(given.values()), CONSTANTS.get(key))
            if any(other != value for other in given.values()):
                faults.append(f"contradictory: {given}")
            if not given and key in REQUIRED_KEYS:
                faults.append(f"missing: {' or '.join((key, *aliases))}")
            setattr(self, key, value)
        faults = faults or [f"does not hold: {rule}" for rule in self._broken_rules()]
        if faults:
            raise ValueError("this is no usable Metis-1.6 configuration:\n  " + "\n  ".join(faults))
        super().__init__(**kwargs)

    def _broken_rules(self) -> list[str]:
        layers, indices = range(self.num_hidden_layers), self.attention_layer_indices
        rules = {
            "num_key_value_heads divides num_attention_heads": (
                self.num_attention_heads % self.num_key_value_heads == 0
            ),
            "mamba_head_dim divides mamba_expand * hidden_size": (
                self.d_inner % self.mamba_head_dim == 0
            ),
            "mamba_ngroups divides the Mamba heads": self.mamba_heads % self.mamba_ngroups == 0,
            f"attention_layer_indices {indices} ascend within 0..{len(layers) - 1}": (
                indices == sorted(set(indices) & set(layers))
            ),
            "num_experts_per_tok <= n_routed_experts": (
                self.num_experts_per_tok <= self.n_routed_experts
            ),
            "num_passes <= max_passes": self.num_passes <= self.max_passes,
            "n_shared_experts is 1": self.n_shared_experts == 1,
        }
        return [rule for rule, holds in rules.items() if not holds]

    @property
    def d_inner(self) -> int:
        return self.mamba_expand * self.hidden_size

    @property
    def mamba_heads(self) -> int:
        return self.d_inner // self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.d_inner + 2 * self.mamba_ngroups * self.mamba_d_state
