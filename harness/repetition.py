# SPDX-License-Identifier: Apache-2.0
"""Compares, as they come, what an engine gives each time that it is asked the same.

Logprobs are compared by their bits. Of each row only the values that differ are held, so that twenty
prefills of some thousand rows need the memory of one. Which of them are the right ones nobody says:
those that came most often are taken for usual, so that a first time that went wrong is one time of
many. Needs neither torch nor vLLM: it reads the attributes of vLLM's `RequestOutput`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.evidence.repetitions import OtherRows, Repetitions

_LISTED = 20  # requests and times of which a record keeps where they differ
_LISTED_ROWS = 8


class _Row(NamedTuple):
    """What came back at one row: the token that follows, and logprobs as the bits of float64."""

    token: int
    top: tuple[int, ...]
    logprobs: bytes


class Repeated:
    """Takes a round's outputs time after time.

    Args:
        number: of the round.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._times = 0
        # By request and row: what came back there, in the order of its first time, and when.
        self._seen: dict[str, dict[int, dict[_Row, list[int]]]] = {}
        self._first_generated: dict[str, int] = {}
        self._steps: list[Hashable] = []
        self._hits: list[Hashable] = []

    def add(self, outputs: Sequence[Any], steps: Hashable) -> None:
        """Take what one more time gave.

        Args:
            outputs: finished `RequestOutput`s, with logprobs, of prompts too where they were asked for.
            steps: what the engine's steps were made up of; equal where they were alike.
        """
        for output in outputs:
            rows = self._seen.setdefault(output.request_id, {})
            self._first_generated[output.request_id] = len(output.prompt_token_ids) - 1
            for number, row in _rows(output):
                rows.setdefault(number, {}).setdefault(row, []).append(self._times)
        self._times += 1
        self._steps.append(steps)
        self._hits.append(tuple(output.num_cached_tokens for output in outputs))

    def found(self) -> Repetitions:
        """Return how often what differed."""
        others: dict[tuple[str, int], dict[int, float]] = {}
        for request, rows in self._seen.items():
            for time, number, spread in _others(rows):
                others.setdefault((request, time), {})[number] = spread
        listed = [
            OtherRows(
                time=time,
                request=request,
                count=len(rows),
                rows=sorted(rows)[:_LISTED_ROWS],
                first_generated=self._first_generated[request],
                spread_nats=max(rows.values()),
            )
            for (request, time), rows in others.items()
        ]
        listed.sort(key=lambda one: (-one.spread_nats, one.time, one.request))
        places = [(request, row) for (request, _), rows in others.items() for row in rows]
        return Repetitions(
            round=self._number,
            times=self._times,
            rows=sum(map(len, self._seen.values())),
            other_rows=len(places),
            other_prefill_rows=sum(row <= self._first_generated[name] for name, row in places),
            distinct_rows=len(set(places)),
            other_times=len({time for _, time in others}),
            spread_nats=max((one.spread_nats for one in listed), default=0.0),
            others=listed[:_LISTED],
            same_steps=self._steps.count(self._steps[0]) if self._steps else 0,
            same_hits=self._hits.count(self._hits[0]) if self._hits else 0,
        )


def _rows(output: Any) -> Iterator[tuple[int, _Row]]:
    """Yield the rows of a finished request by their number; see `OtherRows`."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    # vLLM gives a prompt's logprobs by the token that they predict; nothing predicts the first.
    for number, top in enumerate((output.prompt_logprobs or [None])[1:]):
        yield number, _row(prompt[number + 1], top)
    for position, top in enumerate(completion.logprobs):
        yield len(prompt) - 1 + position, _row(completion.token_ids[position], top)


def _row(token: int, top: Mapping[int, Any]) -> _Row:
    return _Row(token, tuple(top), array("d", [one.logprob for one in top.values()]).tobytes())


def _others(rows: Mapping[int, Mapping[_Row, Sequence[int]]]) -> Iterator[tuple[int, int, float]]:
    """Yield time, row and spread of what a request's rows were beside the usual."""
    astray: set[int] = set()  # times in which the request has another text by now
    for number, seen in sorted(rows.items()):
        counted = {
            row: left
            for row, times in seen.items()
            if (left := [t for t in times if t not in astray])
        }
        if len(counted) < 2:
            continue
        usual = max(
            counted, key=lambda row: len(counted[row])
        )  # the earlier one of two as frequent
        for row, times in counted.items():
            if row != usual:
                spread = _spread(usual, row)
                yield from ((time, number, spread) for time in times)
                if row.token != usual.token:
                    astray.update(times)


def _spread(usual: _Row, row: _Row) -> float:
    """Return the largest difference of a logprob over the tokens that both have, nats."""
    here, there = (
        dict(zip(one.top, array("d", one.logprobs), strict=True)) for one in (usual, row)
    )
    spreads = [_difference(here[token], there[token]) for token in here.keys() & there.keys()]
    return max(spreads, default=math.inf)


def _difference(usual: float, found: float) -> float:
    """Return how far apart two logprobs are; infinity where one is no number."""
    if usual == found:
        return 0.0  # also where both are infinite
    spread = abs(usual - found)
    return math.inf if math.isnan(spread) else spread
