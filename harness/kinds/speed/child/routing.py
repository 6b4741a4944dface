# SPDX-License-Identifier: Apache-2.0
"""Weights drawn so that tokens spread over the experts, and how far they do.

vLLM's dummy weights send every token to the same experts, and a batch then runs too fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch

from harness.checkpoints.quantize import FP8
from vllm_metis.model.moe import route, select
from vllm_metis.model.streams import read_normed, stream_mean


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    """Draw weights at the scale that keeps activations at one; what is FP8 stays as vLLM filled it.

    On a CPU the linears stay too: vLLM has packed them.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dtype == FP8 or ".routed_experts." in name or name.endswith("_scale"):
            continue
        if name.endswith(".A"):
            parameter.fill_(-1.0)
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() < 2 or name.endswith("mix_logits"):
            parameter.zero_()
        else:
            # A token's own embedding must stand out from what all tokens share.
            scale = 0.1 if name.endswith("stream_embeddings") else 1.0
            parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5, generator=generator)
        seed += 1
    model.process_weights_after_loading()


@torch.inference_mode()
def chosen_experts(model: Any, token_ids: Sequence[int]) -> float:
    """Return how many experts these tokens choose in a layer, on average over the layers.

    Each layer's router is asked about the tokens' embeddings: what the mixers add in between would
    spread them further.
    """
    stack = model.model
    ids = torch.tensor(token_ids, device=stack.stream_embeddings.device)
    streams = stack.embed_input_ids(ids)[:, None] + stack.stream_embeddings
    average = stream_mean(streams)
    history = average.new_zeros((len(ids), stack.config.route_feature_dim), dtype=torch.float32)
    features = stack.depth_memory.route_features(average, torch.zeros_like(average), history)
    counts = []
    for layer in stack.layers:
        moe = layer.moe
        reading = layer.moe_connection.reading(0)
        latent = moe.latent_down(read_normed(streams, *reading))
        logits = route(latent, features, moe.expert_router.weight, moe.expert_router.bias)
        _, experts = select(logits, moe.selection_bias, moe.top_k)
        counts.append(experts.unique().numel())
    return mean(counts)
