# SPDX-License-Identifier: Apache-2.0
"""Latent mixture of experts: a shared narrow space, an FP32 router, routed and shared experts.

The router sees the latent and the depth memory's features. Its choice feeds three things
besides the experts (coalition, entropy, confidence), so routing is computed here, and
handed to vLLM's experts as data in place of logits (`pack`, `unpack`): the experts neither
score nor select again.

Source: docs/model.md, forward pass 2.7; V:model_executor/models/nemotron_h.py (0.31.0) for the
use of the fused experts.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig

from vllm_metis.checkpoint.specs import padded_expert_width
from vllm_metis.config import Metis16Config


class Routing(NamedTuple):
    """What the router of one layer decided for each token, float32.

    Attributes:
        coalition: (T, R), weighted mean of the chosen experts' embeddings.
        entropy: (T, 1), of the unbiased distribution over all experts, 0 to 1.
        confidence: (T, 1), its largest probability.
    """

    coalition: torch.Tensor
    entropy: torch.Tensor
    confidence: torch.Tensor


def route(
    latent: torch.Tensor, route_features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the router's logits of `[latent; route_features]`, (T, E), float32.

    Args:
        latent: (T, latent width); route_features: (T, R); model dtype.
        weight: (E, latent width + R); bias: (E,); float32.
    """
    width = latent.shape[-1]
    # Two products, not one of the concatenation: in an FP32 model the compiler would write
    # the latent straight into the concatenated buffer, and the experts need it contiguous.
    logits = nn.functional.linear(route_features.float(), weight[:, width:], bias)
    return logits + nn.functional.linear(latent.float(), weight[:, :width])


def select(
    logits: torch.Tensor, selection_bias: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by biased logits, weigh by the softmax of the chosen unbiased ones.

    Args:
        logits: (T, E), float32.
        selection_bias: (E,), float32.

    Returns:
        weights (T, K), float32, summing to one, and experts (T, K), int64.
    """
    experts = (logits + selection_bias).topk(top_k, dim=-1).indices
    return logits.gather(-1, experts).softmax(-1), experts


def describe(
    logits: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    expert_embeddings: torch.Tensor,
) -> Routing:
    """Return what the depth memory and the next layers learn of a routing.

    Args:
        logits: (T, E), float32, unbiased.
        weights, experts: (T, K), from `select`.
        expert_embeddings: (E, R), model dtype.
    """
    coalition = (weights[..., None] * expert_embeddings[experts].float()).sum(1)
    probabilities = logits.softmax(-1)
    log = probabilities.clamp(min=1e-9).log()
    entropy = -(probabilities * log).sum(-1, keepdim=True) / math.log(logits.shape[-1])
    return Routing(coalition, entropy, probabilities.amax(-1, keepdim=True))


def pack(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Put a routing into one float32 tensor (T, 2K), the shape-free place of router logits."""
    return torch.cat([weights, experts.to(weights.dtype)], dim=-1)


def unpack(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `custom_routing_function`: read back what `pack` wrote; numbers under 2²⁴ are exact."""
    weights, experts = gating_output.split(topk, dim=-1)
    return weights.contiguous(), experts.to(torch.int32)


class SharedExpert(nn.Module):
    """SwiGLU on the latent, next to the routed experts; a partial sum per TP rank."""

    def __init__(self, config: Metis16Config, prefix: str) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        width = padded_expert_width(config, tp_size) * config.num_shared_experts
        self.gate_up_proj = MergedColumnParallelLinear(
            config.moe_latent_size,
            [width, width],
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(
            width,
            config.moe_latent_size,
            bias=False,
            reduce_results=False,
            return_bias=False,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(latent)))


class LatentMoE(nn.Module):
    """The feed-forward sublayer of every layer."""

    def __init__(
        self, config: Metis16Config, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        latent, features = config.moe_latent_size, config.route_feature_dim
        self.latent_down = ReplicatedLinear(
            config.hidden_size,
            latent,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.latent_down",
        )
        self.latent_up = ReplicatedLinear(
            latent,
            config.hidden_size,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.latent_up",
        )
        self.expert_router = nn.Linear(latent + features, config.num_experts, dtype=torch.float32)
        self.expert_router.requires_grad_(False)
        self.selection_bias = nn.Parameter(
            torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False
        )
        self.expert_embeddings = nn.Parameter(
            torch.empty(config.num_experts, features), requires_grad=False
        )
        self.shared_expert = (
            SharedExpert(config, f"{prefix}.shared_expert") if config.num_shared_experts else None
        )
        self.experts = FusedMoEFactory(
            shared_experts=self.shared_expert,
            num_experts=config.num_experts,
            top_k=self.top_k,
            hidden_size=latent,
            intermediate_size=padded_expert_width(config, get_tensor_model_parallel_world_size()),
            renormalize=False,
            custom_routing_function=unpack,
            quant_config=quant_config,
            router_logits_dtype=torch.float32,
            prefix=f"{prefix}.experts",
        )

    def forward(
        self, hidden_states: torch.Tensor, route_features: torch.Tensor
    ) -> tuple[torch.Tensor, Routing]:
        """Return the sublayer's output (T, D), model dtype, and what the router decided.

        Args:
            hidden_states: (T, D), model dtype.
            route_features: (T, R), model dtype.
        """
        latent = self.latent_down(hidden_states)
        logits = route(latent, route_features, self.expert_router.weight, self.expert_router.bias)
        weights, experts = select(logits, self.selection_bias, self.top_k)
        routing = describe(logits, weights, experts, self.expert_embeddings)
        output = self.experts(hidden_states=latent, router_logits=pack(weights, experts))
        return self.latent_up(output), routing
