# SPDX-License-Identifier: Apache-2.0
"""How far tokens spread over the experts.

vLLM's dummy weights send every token to the same experts, and a batch then runs too fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch

from vllm_metis.model.few_tokens import features
from vllm_metis.model.router import route, select
from vllm_metis.model.streams import read_normed, stream_mean


@torch.inference_mode()
def chosen_experts(model: Any, token_ids: Sequence[int]) -> float:
    """Return how many experts these tokens choose in a layer, on average over the layers.

    Each layer's router is asked about the tokens' embeddings: what the mixers add in between would
    spread them further.
    """
    stack, memory = model.model, model.model.depth_memory
    ids = torch.tensor(token_ids, device=stack.stream_embeddings.device)
    streams = stack.embed_input_ids(ids)[:, None] + stack.stream_embeddings
    average = stream_mean(streams)
    history = average.new_zeros((len(ids), stack.config.route_feature_dim), dtype=torch.float32)
    none = torch.zeros_like(average)
    told = features(average, none, history, memory.route_weight, memory.route_bias)
    counts = []
    for layer in stack.layers:
        moe = layer.moe
        reading = layer.moe_connection.reading(0)
        latent = moe.latent_down(read_normed(streams, *reading))
        logits = route(latent, told, moe.expert_router.weight, moe.expert_router.bias)
        _, experts = select(logits, moe.selection_bias, moe.top_k)
        counts.append(experts.unique().numel())
    return mean(counts)
