# SPDX-License-Identifier: Apache-2.0
"""Latent mixture of experts: a shared narrow space, an FP32 router, routed and shared experts.

The router sees the latent and the depth memory's features, and its choice (`router`) is computed
apart from vLLM's experts, which take it as data. For a few tokens of an unquantized model on one
rank's own experts, everything is run by kernels made for that (`few_tokens`); which of the two is
decided for each batch, behind an operator that the compiler does not look into.

Source: docs/model.md, forward pass 2.7; V:model_executor/models/nemotron_h.py (0.31.0) for the
use of the fused experts.
"""

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from vllm_metis.checkpoint.specs import padded_expert_width
from vllm_metis.config import Metis16Config
from vllm_metis.model.few_tokens import FEW, run_product
from vllm_metis.model.router import Routing, choose, route, unpack
from vllm_metis.model.switches import KERNELS


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
    """The feed-forward sublayer of every layer.

    Buffer, where a few tokens have kernels of their own, filled by `finalize`: `router_rows`
    (E, D + R), float32, the router's weight with `latent_down` multiplied into it, so that it need
    not wait for the latent.
    """

    router_rows: torch.Tensor

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

        self.has_few = KERNELS and self._experts_lie_plain()
        if self.has_few:
            shape = config.num_experts, config.hidden_size + features
            rows = torch.full(shape, float("nan"), dtype=torch.float32)
            self.register_buffer("router_rows", rows, persistent=False)
            self.prefix = prefix
            layers = get_current_vllm_config().compilation_config.static_forward_context
            if prefix in layers:
                raise ValueError(f"Duplicate layer name: {prefix}")
            layers[prefix] = self

    def _experts_lie_plain(self) -> bool:
        """Whether this rank holds a part of every expert, as it was loaded."""
        method = self.experts.routed_experts.quant_method
        parallel = self.experts.moe_config.moe_parallel_config
        return (
            type(method) is UnquantizedFusedMoEMethod
            and method.unquantized_backend is UnquantizedMoeBackend.TRITON
            and not parallel.use_ep
            and parallel.dp_size == 1
            and not self.experts.moe_config.is_sequence_parallel
        )

    def finalize(self) -> None:
        """Compute the router's rows over the hidden states from the loaded weights."""
        if self.has_few:
            weight, down = self.expert_router.weight.double(), self.latent_down.weight.double()
            of_latent, of_features = weight.split([len(down), weight.shape[1] - len(down)], dim=1)
            self.router_rows.copy_(torch.cat([of_latent @ down, of_features], dim=1))

    def forward(
        self, hidden_states: torch.Tensor, route_features: torch.Tensor, history: torch.Tensor
    ) -> tuple[torch.Tensor, Routing]:
        """Return the sublayer's output (T, D), model dtype, and what is told of the routing.

        Args:
            hidden_states: (T, D), model dtype.
            route_features: (T, R), model dtype.
            history: (T, R), float32, of the layers before.
        """
        if not self.has_few:
            return self.of_many(hidden_states, route_features, history)
        output, *told = torch.ops.vllm.metis_latent_moe(
            hidden_states, route_features, history, _encode_layer_name(self.prefix)
        )
        return output, Routing(*told)

    def of_many(
        self, hidden_states: torch.Tensor, route_features: torch.Tensor, history: torch.Tensor
    ) -> tuple[torch.Tensor, Routing]:
        """See `forward`; by vLLM's experts, for any number of tokens."""
        latent = self.latent_down(hidden_states)
        logits = route(latent, route_features, self.expert_router.weight, self.expert_router.bias)
        routing, told = choose(
            logits, self.selection_bias, self.expert_embeddings, history, self.top_k
        )
        output = self.experts(hidden_states=latent, router_logits=routing)
        return self.latent_up(output), told

    def of_few(
        self, hidden_states: torch.Tensor, route_features: torch.Tensor, history: torch.Tensor
    ) -> tuple[torch.Tensor, Routing]:
        """See `forward`; by the kernels made for a few tokens."""
        from vllm_metis.model import few_tokens_kernel as kernel

        latent, logits = kernel.products(
            hidden_states,
            self.latent_down.weight,
            kernel.Beside(
                [hidden_states, route_features], self.router_rows, self.expert_router.bias
            ),
        )
        routing, told = choose(
            logits, self.selection_bias, self.expert_embeddings, history, self.top_k
        )
        shared, routed = self.shared_expert, self.experts.routed_experts
        output = kernel.experts(
            latent,
            routing,
            routed.w13_weight,
            routed.w2_weight,
            shared.gate_up_proj.weight if shared else None,
            shared.down_proj.weight if shared else None,
        )
        if self.experts.moe_config.tp_size > 1:
            output = tensor_model_parallel_all_reduce(output)
        return run_product(output, self.latent_up.weight), told


def _latent_moe(
    hidden_states: torch.Tensor,
    route_features: torch.Tensor,
    history: torch.Tensor,
    layer_name: LayerNameType,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    few = 0 < hidden_states.shape[0] <= FEW
    run = layer.of_few if few else layer.of_many
    output, told = run(hidden_states, route_features, history)
    return output, *told


def _latent_moe_shapes(
    hidden_states: torch.Tensor,
    route_features: torch.Tensor,
    history: torch.Tensor,
    layer_name: LayerNameType,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = hidden_states.shape[0]
    scalars = [history.new_empty((tokens, 1)) for _ in range(2)]
    wide = [torch.empty_like(history) for _ in range(2)]
    return torch.empty_like(hidden_states), wide[0], wide[1], scalars[0], scalars[1]


direct_register_custom_op("metis_latent_moe", _latent_moe, fake_impl=_latent_moe_shapes)
