# SPDX-License-Identifier: Apache-2.0
"""From a measured noise floor to a budget.

The rule is flash-attention's (github.com/Dao-AILab/flash-attention, tests/test_flash_attn.py and
tests/cute/test_flash_attn.py): an implementation may be off the FP32 reference by twice what plain
PyTorch in the same precision is off, plus one step of that precision's arithmetic. So no limit is
chosen by hand:

    floor  = error of the port in the served precision against the port in FP32, on the same prompts
    budget = 2 * floor + resolution        (4 * floor for a divergence, which is quadratic in the
    error)

The floor is taken at every position of the cell's sequences, inside the prompts too. A router that
flips makes errors heavy-tailed: over 128 positions of a tiny checkpoint in BF16 the worst logprob
error of the very same port is anything from 0.11 to 1.1 nats, over 1000 positions it is 0.6 to 1.1.

FP32 has no floor. Its limit is fixed and lies between two measured magnitudes: a correct run is off
by 1e-6 to 2e-5 nats (summation order), the smallest known fault (the two epsilons swapped) by 4e-3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FP32_LIMIT_NATS = 1e-4
FLOOR_FACTOR = 2.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Precision:
    """How a checkpoint is served, and what the port does to measure that precision's floor."""

    dtype: str  # vLLM's model dtype
    mantissa_bits: int  # stored bits of the dtype in which logits leave the model
    simulate_fp8: bool  # the port rounds the quantized modules' weights and inputs to E4M3
    has_floor: bool


PRECISIONS = {
    "fp32": Precision("float32", 23, simulate_fp8=False, has_floor=False),
    "bf16": Precision("bfloat16", 7, simulate_fp8=False, has_floor=True),
    "fp8": Precision("bfloat16", 7, simulate_fp8=True, has_floor=True),
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
    if metric == "decode_logprob_error":
        return logit_resolution
    if metric == "top20_kl":
        return logit_resolution**2 / 8
    if metric == "total_variation":
        return logit_resolution / 4
    raise ValueError(f"no resolution is known for {metric!r}")


def budget(metric: str, floor: float, resolution_of_metric: float) -> float:
    """The limit of a metric with that floor."""
    factor = FLOOR_FACTOR**2 if metric == "top20_kl" else FLOOR_FACTOR
    return factor * floor + resolution_of_metric


def near_tie_limit(worst_margin_floor: float) -> float:
    """How much the reference may prefer its own token for another one to pass as a tie, in nats.

    Args:
        worst_margin_floor: largest error of the port in the served precision on the margin between
            two best tokens. Two logprobs decide a greedy choice, so the floor is that of their
            difference; 0 where there is no floor, and then there are no ties.
    """
    return FLOOR_FACTOR * worst_margin_floor
