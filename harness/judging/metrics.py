# SPDX-License-Identifier: Apache-2.0
"""How far a candidate is from the reference: one function a metric, in float64, per position.

vLLM returns the `K` most likely tokens of a position, not the vocabulary, so Kullback-Leibler
divergence and total variation are taken over those K tokens with everything else as one further
outcome. Joining outcomes never raises either of them: both figures are lower bounds of the
full-vocabulary ones.

A `Metric` says of a summary figure in which direction it is better and in which unit it is, so that
nothing guesses that from a name. Each kind of cell has a table of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Numbers = Sequence[float] | Sequence[Sequence[float]] | Array

# Mass below this is rounding of FP32 logprobs (1e-7 for a token of probability near 1), not a tail.
_SMALLEST_MASS = 1e-9


@dataclass(frozen=True)
class Metric:
    """A summary figure: its unit, its better direction, and what counts as a move.

    A figure has moved when it changed by more than the factor `moved_ratio` and by more than
    `negligible`. Errors of correct runs differ by less than 2 between two machines, a known fault
    costs at least 100 (a wrong epsilon) and up to 1e6 (swapped passes). Times repeat within a few
    percent on one machine.
    """

    unit: str
    better: Literal["lower", "higher", "none"]
    moved_ratio: float = 1.0
    negligible: float = 0.0
    of_machine: bool = False  # only a machine of the same kind repeats it


# What more than one kind of cell measures.
TTFT_MS = Metric("ms", "lower", 1.25, 5.0, of_machine=True)
TPOT_MS = Metric("ms", "lower", 1.1, 0.5, of_machine=True)
DECODE_TOK_S = Metric("tokens/s", "higher", 1.1, 5.0, of_machine=True)


def logprob_error(reference: Numbers, candidate: Numbers) -> Array:
    """Absolute difference of logprobs, in nats, in the shape given."""
    expected, observed = _pair(reference, candidate)
    return np.abs(observed - expected)


def top_k_kl(reference: Numbers, candidate: Numbers) -> Array:
    """KL(reference || candidate) per position.

    Args:
        reference: logprobs of the reference at the candidate's top tokens, (T, K), nats.
        candidate: logprobs of the candidate at the same tokens, (T, K), nats.

    Returns:
        (T,), nats; a lower bound of the divergence over the vocabulary.
    """
    expected, observed = (_with_rest(logprobs) for logprobs in _pair(reference, candidate))
    divergence: Array = np.sum(expected * (np.log(expected) - np.log(observed)), axis=-1)
    return divergence


def total_variation(reference: Numbers, candidate: Numbers) -> Array:
    """Half the L1 distance of the two distributions per position, (T,), 0 to 1; (T, K) in."""
    expected, observed = (_with_rest(logprobs) for logprobs in _pair(reference, candidate))
    distance: Array = 0.5 * np.sum(np.abs(expected - observed), axis=-1)
    return distance


def margin_error(reference: Numbers, candidate: Numbers) -> Array:
    """Absolute difference of the margin between the first two tokens, (T,), nats; (T, K) in."""
    expected, observed = _pair(reference, candidate)
    return logprob_error(expected[:, 0] - expected[:, 1], observed[:, 0] - observed[:, 1])


def logprob_sqnr_db(reference: Numbers, candidate: Numbers) -> float:
    """Power of the reference's logprobs over power of the error, in dB; infinite when equal."""
    expected, observed = _pair(reference, candidate)
    return decibels(float(np.sum(expected**2)), float(np.sum((observed - expected) ** 2)))


def decibels(signal: float, noise: float) -> float:
    """The ratio of two powers in dB; infinite without noise."""
    return float("inf") if noise == 0 else 10 * float(np.log10(signal / noise))


# Metric by name: its function, and the field of a request and of its scores that it compares.
JUDGED: dict[str, tuple[Callable[[Numbers, Numbers], Array], str]] = {
    "decode_logprob_error": (logprob_error, "logprobs"),
    "top20_kl": (top_k_kl, "top_logprobs"),
    "total_variation": (total_variation, "top_logprobs"),
}
# Those whose floor is measured: the margin's decides what is a near tie.
FLOORED = {**JUDGED, "margin": (margin_error, "top_logprobs")}


def _pair(reference: Numbers, candidate: Numbers) -> tuple[Array, Array]:
    expected = np.asarray(reference, dtype=np.float64)
    observed = np.asarray(candidate, dtype=np.float64)
    if expected.shape != observed.shape:
        raise ValueError(
            f"reference has shape {expected.shape}, candidate {observed.shape}: "
            "not the same positions"
        )
    return expected, observed


def _with_rest(logprobs: Array) -> Array:
    """Probabilities of the K tokens and of all others together, (T, K + 1), rows of sum 1."""
    top = np.exp(logprobs)
    rest = np.maximum(1.0 - np.sum(top, axis=-1, keepdims=True), _SMALLEST_MASS)
    joined = np.maximum(np.concatenate([top, rest], axis=-1), np.finfo(np.float64).tiny)
    probabilities: Array = joined / np.sum(joined, axis=-1, keepdims=True)
    return probabilities
