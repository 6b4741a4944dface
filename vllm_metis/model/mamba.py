# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixers: one cache layer per pass over one set of parameters.

vLLM binds conv and SSM state to the mixer object that is registered under a layer name.
The mixer of a later pass is a shallow copy of the first under a name of its own: both hold
the same parameter, buffer and module tables, so whatever loading, quantization or a weight
reload replaces is replaced for both, and nothing is held or processed twice.

Source: docs/model.md, forward pass 2.4; vllm/model_executor/layers/mamba/mamba_mixer2.py (0.31.0).
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from vllm.config import CacheConfig, ModelConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name

from vllm_metis.config import Metis16Config
from vllm_metis.model.few_tokens import FeatureInputs, project, project_with_features


class UnpackedLinearMethod(UnquantizedLinearMethod):
    """Leaves a weight as it was loaded.

    On CPUs with AVX512_BF16 vLLM packs the weight of every linear, the depthwise
    convolution's included, for a product that Mamba-2 never runs: the mixer reads its own
    view. In FP32, and for some widths, packing fails.
    """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


def float32_per_head(num_heads: int) -> nn.Parameter:
    """Return a parameter of one FP32 value per head of this rank, whatever the model dtype."""
    heads = num_heads // get_tensor_model_parallel_world_size()
    parameter = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
    return parameter


class Metis16Mamba(nn.Module):
    """Mamba-2 with a gated norm per group, run once per pass."""

    def __init__(
        self,
        config: Metis16Config,
        model_config: ModelConfig,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.mamba = MambaMixer2(
            hidden_size=config.hidden_size,
            ssm_state_size=config.mamba_d_state,
            conv_kernel_size=config.mamba_d_conv,
            intermediate_size=config.mamba_d_inner,
            use_conv_bias=True,
            use_bias=False,
            n_groups=config.mamba_n_groups,
            num_heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            rms_norm_eps=config.mamba_norm_eps,
            activation="silu",
            model_config=model_config,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.mamba",
        )
        # vLLM's mixer holds these two in the model dtype; the model defines them in FP32.
        self.mamba.D = float32_per_head(config.mamba_num_heads)
        self.mamba.dt_bias = float32_per_head(config.mamba_num_heads)
        if quant_config is not None and not hasattr(config, "quantization_config"):
            # Quantizing on load would take this one too, which FP8 releases keep as trained.
            self.mamba.out_proj = RowParallelLinear(
                config.mamba_d_inner,
                config.hidden_size,
                bias=False,
                prefix=f"{prefix}.mamba.out_proj",
            )
        if current_platform.is_cpu():
            self.mamba.conv1d.quant_method = UnpackedLinearMethod()
        # A tuple, so that the copies are not registered as modules a second time.
        self.passes = (
            self.mamba,
            *(
                mixer_of_pass(self.mamba, f"{prefix}.mamba_pass{p}")
                for p in range(1, config.num_passes)
            ),
        )

    def forward(
        self, hidden_states: torch.Tensor, inputs: FeatureInputs, pass_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mixer output of one pass, (T, D), and the router's features, (T, R).

        The steps are those of `MambaMixer2.forward`, whose products are taken apart from it.

        Args:
            hidden_states: (T, D), model dtype.
        """
        mixer = self.passes[pass_index]
        projected, features = project_with_features(mixer.in_proj, hidden_states, inputs)
        width = mixer.tped_intermediate_size
        scanned = hidden_states.new_empty((hidden_states.shape[0], width))
        torch.ops.vllm.mamba_mixer2(projected, scanned, _encode_layer_name(mixer.prefix))
        gated = mixer.norm(scanned, projected[..., :width])
        return project(mixer.out_proj, gated), features

    def check_states(self, dtypes: Sequence[torch.dtype]) -> None:
        """Hold the dtypes that the model tells vLLM of a conv and an SSM state against the mixer's.

        vLLM sizes the cache's pages by the model's word and fills them by the mixer's; where they
        differ it ends in an assertion without a text, or a state takes less than its page.

        Args:
            dtypes: (conv, SSM), as the model class declares them.
        Raises:
            ValueError: they differ; the message holds both.
        """
        kept = tuple(self.mamba.get_state_dtype())
        if tuple(dtypes) != kept:
            raise ValueError(
                f"the model declares conv and SSM states in {tuple(dtypes)}, but "
                f"{self.mamba.prefix} keeps them in {kept}; both must follow from "
                "config.json and --mamba-ssm-cache-dtype: the plugin does not fit this vLLM"
            )


def mixer_of_pass(mixer: MambaMixer2, prefix: str) -> MambaMixer2:
    """Return a mixer that shares everything with `mixer` but its name and its caches."""
    twin = copy.copy(mixer)
    twin.prefix = prefix
    twin.kv_cache = tuple(torch.tensor([]) for _ in mixer.kv_cache)
    context = get_current_vllm_config().compilation_config.static_forward_context
    if prefix in context:
        raise ValueError(f"Duplicate layer name: {prefix}")
    context[prefix] = twin
    return twin
