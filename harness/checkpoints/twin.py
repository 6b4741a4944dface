# SPDX-License-Identifier: Apache-2.0
"""vLLM's own hybrid with the matrices of a Metis-1.6 shape: what the plugin's speed is held against.

It is NemotronH with the same mixers and latent experts, its stack written out once for each pass, and
without hyper-connections, depth memory and route features. Its experts have two matrices where ours
have three, so these are half as wide again: as many bytes. Weights are drawn in the engine, so that
tokens spread over its experts as they do over ours.

Source: vllm/model_executor/models/nemotron_h.py (0.31.0).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.nn import functional as F

from harness.checkpoints.write import config_of
from harness.files import write_atomic
from vllm_metis.config import Metis16Config


def twin_config(shape: str, dtype: str) -> dict[str, Any]:
    """Return the config.json of the twin of a shape."""
    ours = Metis16Config(**config_of(shape))
    mixers = [
        "*" if i in ours.attention_layer_indices else "M" for i in range(ours.num_hidden_layers)
    ]
    pattern = "".join(f"{mixer}E" for mixer in mixers) * ours.num_passes
    expert_width = 3 * ours.moe_intermediate_size // 2
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": dtype,
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "max_position_embeddings": ours.max_position_embeddings,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "num_attention_heads": ours.num_attention_heads,
        "num_key_value_heads": ours.num_key_value_heads,
        "head_dim": ours.head_dim,
        "attention_bias": False,
        "mamba_num_heads": ours.mamba_num_heads,
        "mamba_head_dim": ours.mamba_head_dim,
        "n_groups": ours.mamba_n_groups,
        "ssm_state_size": ours.mamba_d_state,
        "conv_kernel": ours.mamba_d_conv,
        "chunk_size": ours.mamba_chunk_size,
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "intermediate_size": ours.moe_latent_size,
        "moe_latent_size": ours.moe_latent_size,
        "n_routed_experts": ours.num_experts,
        "num_experts_per_tok": ours.num_experts_per_tok,
        "moe_intermediate_size": expert_width,
        "n_shared_experts": ours.num_shared_experts,
        "moe_shared_expert_intermediate_size": expert_width,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def twin_configuration_only(cache: Path, shape: str, dtype: str) -> Path:
    """Write a folder with the twin's config.json and no weights."""
    folder = cache / f"{shape}-{dtype}-twin"
    write_atomic(folder / "config.json", json.dumps(twin_config(shape, dtype), indent=2) + "\n")
    return folder


@torch.inference_mode()
def chosen_twin_experts(model: Any, token_ids: Sequence[int]) -> float:
    """Return how many experts these tokens choose in a layer, on average over the layers.

    Each layer's router is asked about the tokens' embeddings, as ours are (speed/child/routing.py).
    """
    embedding = model.model.embed_tokens
    embedded = embedding(torch.tensor(token_ids, device=embedding.weight.device)).float()
    read = F.rms_norm(embedded, embedded.shape[-1:])
    top_k = model.config.num_experts_per_tok
    gates = [layer.mixer.gate for layer in model.model.layers if hasattr(layer.mixer, "gate")]
    choices = [(read @ gate.weight.float().T).topk(top_k, dim=-1).indices for gate in gates]
    return mean(experts.unique().numel() for experts in choices)


def twin_weight_bytes(model: Any, tokens: int, experts_share: float) -> int:
    """Return the bytes of weights that a step of the twin reads, its scales included.

    Args:
        tokens: of the step; each reads its row of the embedding.
        experts_share: of the routed experts of a layer that these tokens choose.
    """
    total = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            total += tokens * parameter.shape[1] * parameter.itemsize
        else:
            share = experts_share if ".routed_experts." in name else 1.0
            total += share * parameter.nbytes
    return round(total)
