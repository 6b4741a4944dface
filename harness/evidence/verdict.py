# SPDX-License-Identifier: Apache-2.0
"""What was decided of a cell, and from what."""

from __future__ import annotations

from typing import Literal

from harness.evidence.base import Evidence

VerdictName = Literal["pass", "fail", "error", "skip", "not_reached"]


class Finding(Evidence):
    """One metric against its budget; `budget` is None where the metric is only reported."""

    metric: str
    observed: float
    budget: float | None
    floor: float | None
    passed: bool

    @property
    def margin(self) -> float | None:
        """Budget minus observed."""
        return None if self.budget is None else self.budget - self.observed


class ReachFact(Evidence):
    """One thing that the cell claims about its run."""

    fact: str
    expected: str
    found: str
    reached: bool


class NearTie(Evidence):
    """A generated token that is not the reference's, where the reference hardly prefers its own."""

    request: str
    position: int
    token_id: int
    reference_token_id: int
    margin_nats: float
    limit_nats: float


class WorstPosition(Evidence):
    """A position of largest logprob error, beyond its budget where one is."""

    request: str
    position: int
    token_id: int
    reference: float
    candidate: float
    floor: float | None = None
    budget: float | None = None
    port: float | None = None  # of records from before December 2026


class Verdict(Evidence):
    """What was decided, and from what."""

    verdict: VerdictName
    reasons: list[str] = []
    findings: list[Finding] = []
    reach: list[ReachFact] = []
    near_ties: list[NearTie] = []
    worst: list[WorstPosition] = []
