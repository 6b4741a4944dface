# SPDX-License-Identifier: Apache-2.0
"""Which modules of a checkpoint are FP8, told to vLLM by its own names.

A compressed-tensors config names modules by `targets` and `ignore`, in whatever spelling the
tool that wrote it used; vLLM must build each module for what is stored, or loading breaks
far from the cause. The safetensors headers are the truth, so the names in the config are
replaced by those of the modules whose weights are not FP8. How weights and activations are
quantized stays as the config says.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_metis.checkpoint.names import MAPPER

if TYPE_CHECKING:
    from vllm.config import ModelConfig

FP8_DTYPES = ("F8_E4M3", "float8_e4m3fn")
QUANTIZABLE = re.compile(
    r"(?P<module>model\.layers\.\d+\."
    r"(?:mixer\.(?:mamba\.(?:in|out)_proj|qkv_proj|o_proj)|moe\.experts))"
    r"(?:\.\d+\.\w+|\.\w+_proj)?\.weight"
)
PARTS = re.compile(r"(?<=\.mixer\.)[qkv]_proj")


class QuantizationError(ValueError):
    """A checkpoint whose quantization vLLM cannot build; the message lists what is wrong."""


def stored_dtypes(headers: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the dtypes stored for each module that FP8 may apply to, by vLLM's name.

    Args:
        headers: dtype of each tensor, by its name in the checkpoint.
    """
    modules: dict[str, set[str]] = defaultdict(set)
    for name, dtype in headers.items():
        match = QUANTIZABLE.fullmatch(PARTS.sub("qkv_proj", MAPPER.map_name(name) or ""))
        if match is not None:
            modules[match["module"]].add(dtype)
    return dict(modules)


def describe_to_vllm(
    config: dict[str, Any], headers: Mapping[str, str], dequantize_experts: bool
) -> dict[str, Any]:
    """Return a compressed-tensors config that names exactly the FP8 modules of a checkpoint.

    Args:
        config: `quantization_config` of config.json.
        headers: dtype of each tensor, by its name in the checkpoint.
        dequantize_experts: Whether routed experts are to be built unquantized, and their
            weights expanded while loading.

    Raises:
        QuantizationError: Not one scheme, or a module that is FP8 in part.
    """
    groups = list(config.get("config_groups", {}).values())
    if len(groups) != 1:
        raise QuantizationError(
            f"quantization_config has {len(groups)} config_groups; expected one, for FP8 weights "
            "with a scale per output channel and activations quantized per token"
        )
    modules = stored_dtypes(headers)
    mixed = sorted(module for module, dtypes in modules.items() if len(dtypes) > 1)
    if mixed:
        raise QuantizationError(
            "modules that are FP8 in part, which cannot be built: "
            + ", ".join(f"{module} ({' and '.join(sorted(modules[module]))})" for module in mixed)
        )
    ignore = []
    for module, (dtype,) in sorted(modules.items()):
        experts = module.endswith(".experts")
        if dtype not in FP8_DTYPES or (experts and dequantize_experts):
            # vLLM asks for experts by the projections of the first.
            ignore.append(rf"re:{re.escape(module)}\..*" if experts else module)
    return {
        **config,
        "config_groups": {"group_0": {**groups[0], "targets": ["Linear"]}},
        "ignore": ignore,
    }


def align(model_config: ModelConfig) -> None:
    """Bring the quantization config of a loaded model configuration in line with its weights."""
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    hf_config = model_config.hf_config
    config = getattr(hf_config, "quantization_config", None)
    if config is None or str(config.get("quant_method")).replace("_", "-") != "compressed-tensors":
        return
    metadata = get_safetensors_params_metadata(model_config.model, revision=model_config.revision)
    headers = {k: entry["dtype"] for k, entry in metadata.items() if k != "__metadata__"}
    if headers:
        hf_config.quantization_config = describe_to_vllm(
            config, headers, dequantize_experts=current_platform.is_cpu()
        )
