# SPDX-License-Identifier: Apache-2.0
"""Does the same batch give the same bits each time, or stay within the spread of a kernel that is named?

A right kernel that adds in a fixed order repeats itself to the last bit, on a CPU and on a card, so the
limit is 0. A race in a compiled norm gave 3% of a prefill's rows otherwise, others each time, and was
taken for rounding as long as each answer was held against the reference alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from harness.evidence.repetitions import OtherRows, Repetitions
from harness.evidence.verdict import Finding, ReachFact, Verdict
from harness.judging.findings import fact, measured, none_expected
from harness.judging.metrics import Metric

METRICS = {
    "rows_of_other_bits": Metric("rows", "lower"),
    "repetition_spread_nats": Metric("nats", "lower", 2.0, 1e-6),
}

_REASONS = 5  # places that a verdict names; the record has more


class Spread(Protocol):
    """A kernel that rightly gives other bits each time, and the limit of what it may move."""

    @property
    def kernel(self) -> str: ...
    @property
    def spread_nats(self) -> float: ...


def reach(
    number: int, times: int, rows: int, repetitions: Sequence[Repetitions]
) -> Iterator[ReachFact]:
    """Yield whether a round was asked as often as it says, in the same steps each time.

    Args:
        number, times: of the round.
        rows: that are to be compared each time.
        repetitions: of all rounds that were asked several times.
    """
    if times == 1:
        return
    name = f"round {number}"
    found = next((one for one in repetitions if one.round == number), None)
    yield fact(f"{name}: times asked", times, found.times if found else 1)
    if found is not None:
        yield fact(f"{name}: rows compared each time", rows, found.rows)
        yield fact(f"{name}: times in the first one's steps", times, found.same_steps)
        yield fact(f"{name}: times with the first one's cached tokens", times, found.same_hits)


def judged(verdict: Verdict, repetitions: Sequence[Repetitions], spread: Spread | None) -> Verdict:
    """Return a verdict that also holds repetitions to what they must be.

    Args:
        verdict: on what the first time gave, or on nothing yet.
        spread: None where the same bits are due.
    """
    if not repetitions or verdict.verdict not in ("pass", "fail"):
        return verdict
    found = list(_findings(repetitions, spread))
    reasons = [] if all(one.passed for one in found) else list(_reasons(repetitions, spread))
    return verdict.model_copy(
        update={
            "verdict": "fail" if reasons else verdict.verdict,
            "reasons": [*verdict.reasons, *reasons],
            "findings": [*verdict.findings, *found],
        }
    )


def described(repetitions: Iterable[Repetitions]) -> list[str]:
    """Return a line for each round that did not come back the same, which tells races from the rest."""
    return [
        f"of {one.times} times that round {one.round} was asked, {one.other_times} differ: "
        f"{one.other_rows} of {one.times * one.rows} rows ({one.other_prefill_rows} of the prefill), "
        f"{_pattern(one)}, by up to {one.spread_nats:.3g} nats"
        for one in repetitions
        if one.other_rows
    ]


def _findings(repetitions: Sequence[Repetitions], spread: Spread | None) -> Iterator[Finding]:
    rows = sum(one.other_rows for one in repetitions)
    widest = max(one.spread_nats for one in repetitions)
    if spread is None:
        yield none_expected("rows_of_other_bits", rows)
        yield measured("repetition_spread_nats", widest)
        return
    yield measured("rows_of_other_bits", rows)
    yield Finding(
        metric="repetition_spread_nats",
        observed=widest,
        budget=spread.spread_nats,
        floor=None,
        passed=widest <= spread.spread_nats,
    )


def _reasons(repetitions: Sequence[Repetitions], spread: Spread | None) -> Iterator[str]:
    limit = (
        -1.0 if spread is None else spread.spread_nats
    )  # the same bits: nothing is little enough
    places = [(each, one) for each in repetitions for one in each.others if one.spread_nats > limit]
    for each, one in places[:_REASONS]:
        allowed = "" if spread is None else f", more than {limit:g} of {spread.kernel}"
        yield (
            f"{one.request}, time {one.time + 1} of {each.times}: {one.count} rows came back with other "
            f"bits than usual, by up to {one.spread_nats:.3g} nats{allowed}: {_named(one)}"
        )
    if len(places) > _REASONS:
        yield f"{len(places) - _REASONS} more in the record, under `repetitions`"


def _named(one: OtherRows) -> str:
    """Return rows as places: of the prompt, or of the token that was generated."""
    generated = [row - one.first_generated for row in one.rows if row >= one.first_generated]
    names = [f"row {row}" for row in one.rows if row < one.first_generated]
    names += [f"token [{position}]" for position in generated]
    return ", ".join(names) + (", …" if one.count > len(one.rows) else "")


def _pattern(one: Repetitions) -> str:
    """Return whether rows differ again and again, as of a state left behind, or by chance."""
    if one.other_times == 1:
        return "in that time alone"
    if one.distinct_rows * one.other_times == one.other_rows:
        return "the same ones each time"
    if 2 * one.distinct_rows > one.other_rows:
        return "other ones each time, as of a race"
    return "some of them again and again"
