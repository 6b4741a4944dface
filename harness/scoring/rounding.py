# SPDX-License-Identifier: Apache-2.0
"""References that differ in rounding only: what the arithmetic of a dtype leaves open.

A right implementation sums in another order, joins other operations into one kernel and so rounds
elsewhere. How far that carries at a position is measured by references that do the like:

    jitter   in a served dtype of few bits: one value in twelve of what a module returns is moved to the
             next number, up or down. That adds the variance of one rounding to each that there is.
    company  in FP8 on load, too: vLLM scales what goes into its experts by the largest value of all
             tokens in the batch. Whose that is decides where in a binade a value is rounded.
    reorder  in FP32: every linear sums its terms in interleaved parts, and Mamba's scan in other chunks.

Hooks and instance attributes of a loaded model: the reference's own files, which checkpoints carry as
remote code, know nothing of it.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

JITTERED = 4
"""References of a dtype with jitter, beside the plain one; harness/judging/tolerance.py says why."""
ORDERS = ((2, 64), (3, 100))
"""FP32 references: parts of each sum, tokens of a chunk of the scan."""

# Of 256 values, up, and as many down: one in 11.6. A step of one unit has the variance of 12 roundings,
# each uniform over a unit.
_MOVED = 11


def jitter(model: nn.Module) -> torch.Generator:
    """Move what the model's modules return by last bits from here on.

    Returns:
        what the moves are drawn from; seed it before each pass.
    """
    draw = torch.Generator()

    def move(module: nn.Module, inputs: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or output.dtype not in (torch.bfloat16, torch.float16):
            return None
        drawn = _bytes(output.numel(), draw).view(output.shape)
        steps = ((drawn < _MOVED).to(torch.int8) - (drawn >= 256 - _MOVED).to(torch.int8)).to(
            output.dtype
        )
        # Half a unit of the largest value of a binade, a whole one after rounding.
        return torch.addcmul(output, steps, output, value=torch.finfo(output.dtype).eps / 2)

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(move)
    return draw


def _bytes(count: int, draw: torch.Generator) -> Tensor:
    """Return random bytes, (count,), eight from one draw: drawing took a fifth of a pass."""
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=draw)
    return words.view(torch.uint8)[:count]


def in_company(model: nn.Module, draw: torch.Generator) -> None:
    """Scale what goes into routed experts from here on as if other tokens had larger values.

    Args:
        draw: what each token's scale is drawn from, evenly over a binade: by how much further it goes
            decides no digit.
    """

    def widen(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        module.headroom = torch.exp2(torch.rand(*inputs[0].shape[:-1], 1, generator=draw))

    for name, module in model.named_modules():
        if ".local_experts." in name and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(widen)


def reorder(model: nn.Module, parts: int, chunk: int) -> None:
    """Have the model sum in another order from here on.

    Args:
        parts: into so many sums, of every so-manieth term, falls each sum of a linear.
        chunk: tokens of one step of Mamba's scan.
    """
    scan_in_chunks(model, chunk)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_in_parts, module, parts)


def scan_in_chunks(model: nn.Module, chunk: int) -> None:
    """Have Mamba's scan take so many tokens a step: the same result, but for rounding."""
    for module in model.modules():
        if isinstance(getattr(module, "chunk", None), int):
            module.chunk = chunk  # type: ignore[assignment]


def _in_parts(linear: nn.Linear, parts: int, x: Tensor) -> Tensor:
    sums = [
        F.linear(x[..., first::parts], linear.weight[:, first::parts]) for first in range(parts)
    ]
    total = torch.stack(sums).sum(0)
    return total if linear.bias is None else total + linear.bias
