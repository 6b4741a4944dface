# SPDX-License-Identifier: Apache-2.0
"""From a measured noise floor to a budget.

The rule is flash-attention's (github.com/Dao-AILab/flash-attention, tests/test_flash_attn.py and
tests/cute/test_flash_attn.py): an implementation may be off the FP32 reference by twice what plain
PyTorch in the same precision is off, plus one step of that precision's arithmetic. So no limit is
chosen by hand, and each position has its own (harness/judging/positions.py):

    floor  = error against the port in FP32 of the worst of five references in the served precision
             that differ in rounding only, and no less than what they are off on average
    budget = 2 * floor + resolution        (4 * floor for a divergence, which is quadratic in the
    error)

Why a position past its budget is counted and does not fail alone: a router that tips makes errors
heavy-tailed. Of 1408 positions of `tiny` in BF16 a reference is off by 0.024 nats in the median and by
0.3 to 1.0 at worst. The margin by which routers choose does not tell calm positions from others: with
twelve routers a token, 95% have one within twice the noise. Held against the budgets that the four others
make, a reference is past at 0.2% to 1.1% of positions (leave one out), there by up to 4.7 times, for a
tip that none of the others had. So two shares of positions are judged, those past their floor (one in six
by symmetry) and those past their budget, each with the worst reference's as its floor. Taken for a
candidate against four others, a reference fails the share past the budget in 1 of 280 cells. With six
jittered references instead of four the same cells fail and pass, for half as much time again.

A greedy token that differs is judged at its position alone, by the floor of the margin there: a tie is
what either the reference or the port in the served precision prefers by no more than that. (FP8 moves
many margins by more than a nat, and the port's with them.) On one H200, right cells in BF16 used up to
0.73 of that budget, and rows that a race had spoiled 7 to 24 times.

FP32's floor is what references are off that sum in other orders: 6e-6 to 2.5e-5 nats. A right run is off
by 1.2e-5 to 1.8e-5 on CPUs and by up to 2.6e-5 on a card; 0.1% of another token's values leaking in is
9.3e-5, two epsilons swapped 4e-3. A kernel has more orders than the two that are measured, hence a factor
that is larger than 2: limits are 3e-5 to 9e-5. Now and then a router tips in FP32 too (twice in 29,000
positions, by 7e-4 and 5e-3 nats): a reference in which one did says nothing of the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

FP32_FACTOR = 4.0
_TIPPED = (
    10.0  # times what other orders are off: two orders differ by less than 2, a tip is 30 and more
)
FLOOR_FACTOR = 2.0

Array = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Array)


@dataclass(frozen=True)
class Precision:
    """How a checkpoint is served, and what the port does to measure that precision's floors."""

    dtype: str  # vLLM's model dtype
    mantissa_bits: int  # stored bits of the dtype in which logits leave the model
    fp8_scale: Literal["channel", "tensor"] | None  # of the weights that the port rounds to E4M3
    has_ties: bool  # whether rounding may decide between two tokens


PRECISIONS = {
    "fp32": Precision("float32", 23, fp8_scale=None, has_ties=False),
    "bf16": Precision("bfloat16", 7, fp8_scale=None, has_ties=True),
    "fp8": Precision("bfloat16", 7, fp8_scale="channel", has_ties=True),
    "fp8load": Precision("bfloat16", 7, fp8_scale="tensor", has_ties=True),
}


def precision(name: str) -> Precision:
    """The precision of that name.

    Raises:
        ValueError: naming the known ones.
    """
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def resolution(magnitude: npt.ArrayLike, mantissa_bits: int) -> Array:
    """Distance of neighbouring numbers of a binary format at each magnitude, in the shape given."""
    exponent = np.floor(np.log2(np.maximum(np.abs(magnitude), np.finfo(np.float64).tiny)))
    steps: Array = np.exp2(exponent - mantissa_bits)
    return steps


def metric_resolution(metric: str, logit_resolution: Array) -> Array:
    """The most that rounding each logit to its dtype can do to a metric, per position.

    Rounding moves a logit by half a step, so two logits move apart by one step `u` at most. A
    logprob then moves by at most `u`; a divergence is at most u**2 / 8 (Hoeffding's lemma), a total
    variation u / 4.
    """
    if metric in ("decode_logprob_error", "margin"):
        return logit_resolution
    if metric == "top20_kl":
        return logit_resolution**2 / 8
    if metric == "total_variation":
        return logit_resolution / 4
    raise ValueError(f"no resolution is known for {metric!r}")


def budget(metric: str, floor: Number, resolution_of_metric: Number) -> Number:
    """The limit of a metric with that floor, or of each position with its own."""
    factor = FLOOR_FACTOR**2 if metric == "top20_kl" else FLOOR_FACTOR
    return factor * floor + resolution_of_metric


def share_budget(worst: int) -> int:
    """How many positions of a right candidate may be past, where so many are of the worst reference.

    Twice as many, and two more, which is what one tip adds: at its position, and at the next.
    """
    return int(FLOOR_FACTOR) * worst + 2


def fp32_floor(errors: Sequence[float]) -> float:
    """The worst of what orders of sums are off in FP32, those aside in which a router tipped."""
    like = [error for error in errors if error <= _TIPPED * min(errors)]
    return max(like, default=float("nan"))  # which nothing is within
