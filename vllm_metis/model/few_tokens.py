# SPDX-License-Identifier: Apache-2.0
"""Products that take a kernel of their own where tokens are few, as vLLM and torch.compile see them.

    project                 a linear layer
    project_with_features   a linear layer, and the router's features, which nothing in it waits for

Both hand layers that are quantized, and all layers on a CPU, to vLLM. The operators behind them are
opaque to the compiler and take plain tensors: `few_tokens_kernel` runs up to 16 tokens, or up to
`VLLM_METIS_FEW_TOKENS` where that is less, and beyond it what stands here. `product`, `features` and
`experts` are what the kernels compute, in plain PyTorch.

Letters: `T` tokens, `N` rows of a weight, `D` hidden size, `R` route features, `H` latent width, `E`
experts, `K` top-k, `I` width of a routed expert, `J` of the shared one.

Source: docs/model.md, forward pass 2.2, 2.4 and 2.7.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_metis.model.switches import KERNELS, few_tokens

FEW = few_tokens()
"""Up to how many tokens experts and their router are run by kernels in this process."""

FEW_SHARED = min(FEW, 16)
"""The same of products with weights that all tokens share: above, a library's are as fast."""


class FeatureInputs(NamedTuple):
    """What the router's features inside a layer are made of.

    Attributes:
        mean: (T, D), model dtype, of the streams.
        summary: (T, D), model dtype, of what was read of the depth memory.
        history: (T, R), float32.
        weight: (R, at least 2D + R), model dtype; columns beyond are not used.
        bias: (R,), model dtype.
    """

    mean: torch.Tensor
    summary: torch.Tensor
    history: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x weightᵀ`, (T, N)."""
    return nn.functional.linear(x, weight)


def features(
    mean: torch.Tensor,
    summary: torch.Tensor,
    history: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Return the router's features, (T, R), model dtype; arguments as in `FeatureInputs`."""
    inputs = torch.cat([mean, summary, history.to(mean.dtype)], dim=-1)
    return nn.functional.linear(inputs, weight[:, : inputs.shape[-1]], bias).tanh()


def experts(
    latent: torch.Tensor,
    routing: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
) -> torch.Tensor:
    """Return what the chosen experts make of each token, weighted, plus the shared expert's share.

    Args:
        latent: (T, H), model dtype.
        routing: (T, 2K), float32, as `router.pack` puts it.
        gate_up: (E, 2I, H); down: (E, H, I); shared_gate_up: (2J, H); shared_down: (H, J); model dtype.

    Returns:
        (T, H), model dtype; of a rank's part of the experts' width, its part of the sum.
    """
    weights, chosen = routing.chunk(2, dim=-1)
    ids, z = chosen.long(), latent.float()
    gate, up = torch.einsum("tkih,th->tki", gate_up[ids].float(), z).chunk(2, dim=-1)
    inner = (nn.functional.silu(gate) * up).to(latent.dtype).float()
    found = torch.einsum("tkhi,tki->th", down[ids].float(), weights[..., None] * inner)
    if shared_gate_up is not None and shared_down is not None:
        gate, up = (z @ shared_gate_up.float().T).chunk(2, dim=-1)
        inner = (nn.functional.silu(gate) * up).to(latent.dtype).float()
        found = found + inner @ shared_down.float().T
    return found.to(latent.dtype)


def project(linear: LinearBase, x: torch.Tensor) -> torch.Tensor:
    """Return `linear(x)`, without a bias."""
    if not _plain(linear):
        return _without_bias(linear(x))
    y: torch.Tensor = torch.ops.vllm.metis_product(x, linear.weight)
    if isinstance(linear, RowParallelLinear) and linear.reduce_results and linear.tp_size > 1:
        y = tensor_model_parallel_all_reduce(y)
    return y


def project_with_features(
    linear: LinearBase, x: torch.Tensor, inputs: FeatureInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `linear(x)`, of a layer that needs no sum over ranks, and the router's features."""
    if not _plain(linear):
        return _without_bias(linear(x)), features(*inputs)
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.vllm.metis_product_with_features(
        x, linear.weight, *inputs
    )
    return found


def _plain(linear: LinearBase) -> bool:
    """Whether a layer is nothing but a product with a weight that lies as it was loaded."""
    return KERNELS and type(linear.quant_method) is UnquantizedLinearMethod and linear.bias is None


def _without_bias(found: Any) -> torch.Tensor:
    y: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return y


def run_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `product`, by the kernel where tokens are few."""
    if not 0 < x.shape[0] <= FEW_SHARED:
        return product(x, weight)
    from vllm_metis.model import few_tokens_kernel as kernel

    return kernel.product(x, weight)


def _product_with_features(
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    summary: torch.Tensor,
    history: torch.Tensor,
    route_weight: torch.Tensor,
    route_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not 0 < x.shape[0] <= FEW_SHARED:
        return product(x, weight), features(mean, summary, history, route_weight, route_bias)
    from vllm_metis.model import few_tokens_kernel as kernel

    route = kernel.Beside([mean, summary, history], route_weight, route_bias, tanh=True)
    return kernel.products(x, weight, route)


def _product_shape(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _product_with_features_shapes(
    x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, *rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _product_shape(x, weight), _product_shape(x, rest[-1])


direct_register_custom_op("metis_product", run_product, fake_impl=_product_shape)
direct_register_custom_op(
    "metis_product_with_features",
    _product_with_features,
    fake_impl=_product_with_features_shapes,
)
