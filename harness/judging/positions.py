# SPDX-License-Identifier: Apache-2.0
"""Floor and budget of each position, and what share of positions may be past them.

The references that differ in rounding only are samples of what a right implementation gives. At most
positions they agree; where a router is about to tip, those in which it tips are off by far more, and
the position's budget is wide with them. A few samples miss some tips, so a right candidate is past its
budget at some positions too: how many is what the references themselves show, each held against the
budgets that the others make (leave one out).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.judging import metrics, tolerance
from harness.judging.metrics import Array


@dataclass(frozen=True)
class Positions:
    """Errors at the positions of a cell, by metric.

    Attributes:
        errors: of the candidate, (T,).
        roundings: of the references that differ in rounding only, (N, T), N at least 2.
        steps: distance of the dtype's numbers at the largest logit, (T,).
    """

    errors: Mapping[str, Array]
    roundings: Mapping[str, Array]
    steps: Array

    def floors(self, metric: str) -> Array:
        """Return the floor of each position, (T,)."""
        return _floors(self.roundings[metric])

    def budgets(self, metric: str) -> Array:
        """Return the budget of each position, (T,)."""
        return _budgets(metric, self.roundings[metric], self.steps)

    def past_floor(self) -> Share:
        """Return how many logprobs are off by more than any reference's."""
        errors = self.roundings["decode_logprob_error"]
        others = [(own > _floors(rest)).sum() for own, rest in _leave_one_out(errors)]
        past = self.errors["decode_logprob_error"] > self.floors("decode_logprob_error")
        return Share(int(past.sum()), [int(count) for count in others], len(self.steps))

    def past_budget(self) -> Share:
        """Return how many positions are past their budget in any metric; NaN is past."""
        past = np.zeros(len(self.steps), bool)
        others = [past.copy() for _ in self.roundings["margin"]]
        for name in metrics.JUDGED:
            past |= ~(self.errors[name] <= self.budgets(name))
            for mine, (own, rest) in zip(others, _leave_one_out(self.roundings[name]), strict=True):
                mine |= own > _budgets(name, rest, self.steps)
        return Share(int(past.sum()), [int(mine.sum()) for mine in others], len(self.steps))


@dataclass(frozen=True)
class Share:
    """A count of positions: the candidate's, and each reference's against the others."""

    count: int
    others: list[int]
    positions: int

    @property
    def observed(self) -> float:
        return self.count / self.positions

    @property
    def floor(self) -> float:
        return max(self.others) / self.positions

    @property
    def budget(self) -> float:
        return tolerance.share_budget(max(self.others)) / self.positions


def _floors(roundings: Array) -> Array:
    """The worst at the position, and what they are off on average where all are nearly right."""
    floors: Array = np.maximum(roundings.max(0), roundings.mean())
    return floors


def _budgets(metric: str, roundings: Array, steps: Array) -> Array:
    resolution = tolerance.metric_resolution(metric, steps)
    return tolerance.budget(metric, _floors(roundings), resolution)


def _leave_one_out(roundings: Array) -> list[tuple[Array, Array]]:
    return [(own, np.delete(roundings, n, 0)) for n, own in enumerate(roundings)]
