# SPDX-License-Identifier: Apache-2.0
"""vLLM's config hook: what Metis-1.6 needs of the engine, decided before anything is built.

vLLM's float32 default for the SSM state hangs on a hook per architecture
(`NemotronHForCausalLMConfig`, vllm/model_executor/models/config.py:678), which a plugin's
architecture does not get by itself. What cannot work is refused here, in one message,
instead of by an assertion inside a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_metis.config import Metis16Config


_STATE_DTYPE = "mamba_ssm_cache_dtype"  # the key of config.json, and vLLM's name for it


class UnsupportedError(ValueError):
    """Engine settings that Metis-1.6 cannot run with; the message lists all of them."""


def tensor_parallel_sizes(config: Metis16Config) -> list[int]:
    """Sizes that split every Mamba group and KV head whole.

    Heads follow, since both head counts are multiples of these; experts and the shared
    expert are padded to a multiple of the size (`checkpoint.specs.padded_expert_width`).
    """
    limit = min(config.mamba_n_groups, config.num_key_value_heads)
    return [
        size
        for size in range(1, limit + 1)
        if config.mamba_n_groups % size == 0 and config.num_key_value_heads % size == 0
    ]


def refusals(vllm_config: VllmConfig) -> list[str]:
    """Every setting that Metis-1.6 does not support: what was asked for and what to do."""
    from vllm import envs
    from vllm.platforms import current_platform

    config = vllm_config.model_config.hf_config
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    found = []
    sizes = tensor_parallel_sizes(config)
    if parallel.tensor_parallel_size not in sizes:
        found.append(
            f"tensor_parallel_size {parallel.tensor_parallel_size} does not divide both the "
            f"{config.mamba_n_groups} Mamba groups and the {config.num_key_value_heads} KV heads "
            f"of this model; sizes that do: {', '.join(map(str, sizes))}"
        )
    if parallel.pipeline_parallel_size > 1:
        found.append(
            f"pipeline_parallel_size {parallel.pipeline_parallel_size}: the stack runs "
            f"{config.num_passes} times per token, so it cannot be cut into stages; use 1 and "
            "split the model with --tensor-parallel-size"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            found.append(f"{name} {getattr(parallel, name)}: not supported; use 1")
    if parallel.enable_eplb:
        found.append("--enable-eplb: expert load balancing is not supported; leave it off")
    if parallel.use_ubatching:
        found.append("--enable-dbo: dual batch overlap is not supported; leave it off")
    if parallel.enable_expert_parallel and current_platform.is_cpu():
        found.append(
            "--enable-expert-parallel: vLLM 0.31's experts on a CPU take no heed of which experts a "
            "rank holds, and read past them; leave it off"
        )
    if parallel.data_parallel_size > 1 and current_platform.is_cpu():
        found.append(
            f"data_parallel_size {parallel.data_parallel_size}: vLLM 0.31 cannot gather tokens for "
            "experts on a CPU; start servers of their own"
        )
    if parallel.enable_ep_weight_filter:
        found.append(
            "--enable-ep-weight-filter: the load is held against the whole checkpoint, so every "
            "rank reads all of it; leave it off"
        )
    if vllm_config.speculative_config is not None:
        found.append(
            "--speculative-config: speculative decoding is not proven on two passes; leave it off"
        )
    if vllm_config.lora_config is not None:
        found.append(
            "--enable-lora: adapters are not supported; merge the adapter into the checkpoint"
        )
    found += state_refusals(config)
    if cache.mamba_cache_mode == "all":
        found.append("mamba_cache_mode all: not supported; use align, which is the default")
    if cache.prefix_match_unit is not None:
        found.append(
            f"prefix_match_unit {cache.prefix_match_unit}: prefix hits inside a block give wrong "
            "answers on hybrid models in vLLM 0.31; leave it unset"
        )
    if envs.VLLM_BATCH_INVARIANT:
        found.append(
            "VLLM_BATCH_INVARIANT: vLLM 0.31 has no batch-invariant kernels for Mamba-2; unset it"
        )
    found += quantization_refusals(config, vllm_config.model_config.quantization)
    return found


def state_refusals(config: Metis16Config) -> list[str]:
    """What is refused of the dtype that config.json declares for the SSM state."""
    from vllm.config.cache import MambaDType

    declared, known = getattr(config, _STATE_DTYPE, "auto"), get_args(MambaDType)
    if declared in known:
        return []
    found = (
        f"{_STATE_DTYPE} {declared!r} of config.json: expected {', '.join(known)}; mend it there, or "
        "in --hf-overrides"
    )
    return [found]


def quantization_refusals(config: Metis16Config, quantization: str | None) -> list[str]:
    """What is refused of quantizing an unquantized checkpoint while it loads."""
    from vllm.platforms import current_platform

    if quantization is None or hasattr(config, "quantization_config"):
        return []
    if current_platform.is_cpu():
        found = (
            f"quantization {quantization}: vLLM quantizes no experts on a CPU; serve the checkpoint "
            "as it is, or an FP8 checkpoint, whose experts are expanded while loading"
        )
        return [found]
    widths = {
        "Mamba in_proj": config.mamba_d_inner + config.conv_dim + config.mamba_num_heads,
        "experts": config.moe_intermediate_size,
    }
    uneven = [f"{name} has {width} rows" for name, width in widths.items() if width % 128]
    if quantization == "fp8_per_block" and uneven:
        found = (
            "quantization fp8_per_block needs widths that are multiples of 128, and "
            f"{', '.join(uneven)}; use fp8_per_tensor or an FP8 checkpoint"
        )
        return [found]
    return []


class Metis16ConfigHook:
    """Registered in vLLM's `MODELS_CONFIG_MAP`; see vllm/model_executor/models/config.py:18."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Raise `ConfigError` on a bad config.json, after --hf-overrides were applied."""
        from vllm_metis.checkpoint.quantization import align

        model_config.hf_config.check()
        align(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuse what cannot work, and make `mamba_ssm_cache_dtype: auto` mean float32.

        Raises:
            UnsupportedError: A setting is not supported; the message lists all that are not.
        """
        found = refusals(vllm_config)
        if found:
            raise UnsupportedError(
                "Metis-1.6 cannot run with these settings:\n  - " + "\n  - ".join(found)
            )
        # It counts experts' calls, one per layer and step: here a layer is called once per pass.
        # vLLM switches it off itself from torch 2.11 on.
        vllm_config.compilation_config.fast_moe_cold_start = False
        cache = vllm_config.cache_config
        if cache.mamba_ssm_cache_dtype == "auto":
            declared = getattr(vllm_config.model_config.hf_config, _STATE_DTYPE, "auto")
            cache.mamba_ssm_cache_dtype = "float32" if declared == "auto" else declared
