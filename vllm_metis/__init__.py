# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin that serves Lernex's Metis-1.6 models.

`register()` is the `vllm.general_plugins` entry point `metis`. vLLM calls it in every
process it starts, before CUDA is set up, so it registers strings only: nothing of the
model, the configuration or the parsers is imported until vLLM asks for it by name.
"""

from vllm_metis.version import __version__, unsupported_vllm

__all__ = ["__version__", "register"]

ARCHITECTURE = "Metis16ForCausalLM"
MODEL_TYPE = "metis16"


def register() -> None:
    """Make vLLM know the architecture, its configuration, its config hook and its parsers.

    May be called any number of times in any process. With a vLLM that this release was
    not made for it registers nothing but a refusal: other models keep working, and
    loading Metis-1.6 says what is installed, what is needed and how to get it.
    """
    refusal = unsupported_vllm()
    if refusal is not None:
        from vllm_metis.version import refuse

        refuse(MODEL_TYPE, refusal)
        return

    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.transformers_utils import configs
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from vllm_metis.hook import Metis16ConfigHook

    ModelRegistry.register_model(ARCHITECTURE, f"vllm_metis.model.metis16:{ARCHITECTURE}")
    # The table that vLLM's own out-of-library configurations use: a class found here is
    # never treated as remote code, so --trust-remote-code is accepted and not needed.
    configs._CLASS_TO_MODULE["Metis16Config"] = "vllm_metis.config"
    _CONFIG_REGISTRY[MODEL_TYPE] = "Metis16Config"
    MODELS_CONFIG_MAP[ARCHITECTURE] = Metis16ConfigHook
    ReasoningParserManager.register_lazy_module(
        "metis", "vllm_metis.parser.adapters", "MetisReasoningParser"
    )
    ToolParserManager.register_lazy_module("metis", "vllm_metis.parser.adapters", "MetisToolParser")
