# SPDX-License-Identifier: Apache-2.0
"""Environment variables that turn the plugin's own kernels off, to compare them with what they replace."""

import os

from vllm.platforms import current_platform

KERNELS = current_platform.is_cuda_alike()
"""Whether this process has a card that Triton's kernels run on."""

FUSED = "VLLM_METIS_FUSED"
FEW_TOKENS = "VLLM_METIS_FEW_TOKENS"

MOST_TOKENS = 32
"""As many tokens as products made for a few were measured to be faster for (docs/speed.md)."""


def fused() -> bool:
    """Whether this process runs the kernels between two sublayers, and of the router's choice.

    Raises:
        ValueError: VLLM_METIS_FUSED is neither 0 nor 1.
    """
    wanted = os.environ.get(FUSED, "1")
    if wanted not in ("0", "1"):
        raise ValueError(
            f"{FUSED} is {wanted!r}: expected 1 (the Triton kernels where there is CUDA, the "
            "default) or 0 (plain PyTorch, to compare with)"
        )
    return wanted == "1" and KERNELS


def few_tokens() -> int:
    """Return up to how many tokens of a batch the products made for a few are run; 0 for never.

    Raises:
        ValueError: VLLM_METIS_FEW_TOKENS is not a number from 0 to `MOST_TOKENS`.
    """
    wanted = os.environ.get(FEW_TOKENS, str(MOST_TOKENS))
    if not wanted.isdecimal() or int(wanted) > MOST_TOKENS:
        raise ValueError(
            f"{FEW_TOKENS} is {wanted!r}: expected the largest number of tokens for which products "
            f"are run by the kernels made for a few, 0 (never) to {MOST_TOKENS} (the default)"
        )
    return int(wanted) if KERNELS else 0
