# SPDX-License-Identifier: Apache-2.0
"""Findings, facts and verdicts in the few forms that all kinds of cells need."""

from __future__ import annotations

from collections.abc import Iterable

from harness.evidence.verdict import Finding, ReachFact, Verdict


def measured(metric: str, value: float) -> Finding:
    """Return a figure that a report shows and no budget decides."""
    return Finding(metric=metric, observed=float(value), budget=None, floor=None, passed=True)


def none_expected(metric: str, count: float) -> Finding:
    """Return a count that must be zero."""
    return Finding(metric=metric, observed=float(count), budget=0.0, floor=None, passed=count == 0)


def fact(name: str, expected: object, found: object, reached: bool | None = None) -> ReachFact:
    """Return a claim with what was found; it holds where both are equal, unless told."""
    holds = expected == found if reached is None else reached
    return ReachFact(fact=name, expected=str(expected), found=str(found), reached=holds)


def at_least(name: str, expected: float, found: float) -> ReachFact:
    """Return the claim that something happened so often or so long."""
    return ReachFact(
        fact=name,
        expected=f"at least {expected:g}",
        found=f"{found:g}",
        reached=found >= expected,
    )


def missed(facts: Iterable[ReachFact]) -> list[str]:
    """Return a sentence for each claim that does not hold."""
    return [
        f"{one.fact}: expected {one.expected}, found {one.found}"
        for one in facts
        if not one.reached
    ]


def error(reason: str, reach: list[ReachFact] | None = None) -> Verdict:
    """Return the verdict on a record that lacks evidence."""
    return Verdict(verdict="error", reasons=[reason], reach=reach or [])


def not_reached(facts: list[ReachFact]) -> Verdict:
    """Return the verdict on a cell that ran something else than it claims."""
    return Verdict(verdict="not_reached", reasons=missed(facts), reach=facts)
