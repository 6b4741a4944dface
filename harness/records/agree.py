# SPDX-License-Identifier: Apache-2.0
"""Do candidates agree among themselves: one prompt that several cells of a dtype met.

Each is held against the reference alone, cell by cell; here against each other. Two right engines may
round a router to either side, eager and compiled ones say, but what one gives others like it give too.
So a request stands out where, at some position, no request of another cell is within the position's budget
of it, nor within what a tip costs the references that differ in rounding only anywhere in the sequence.
Positions count as far as the tokens before them are the same; of each, the logprob of the token that most
requests gave.

On the BF16 records of one H200, 400 requests of 54 cells on `tiny` and `tiny16`, a race had spoiled
four rows. They are 1.4 to 3.4 nats from the nearest other cell, where 0.15 to 0.29 were allowed, and no
other request is past its limit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.evidence.record import Record
from harness.evidence.scores import RequestScores
from harness.judging import tolerance
from harness.judging.numbers import number
from harness.kinds.parity.observation import EngineObservation, RequestObservation
from harness.kinds.parity.settings import ParitySettings

_FEWEST_CELLS = 3  # of two that differ, neither is the odd one


@dataclass(frozen=True)
class Member:
    """A request of a cell, with the reference's scores of its tokens."""

    cell: str
    request: RequestObservation
    scores: RequestScores


@dataclass(frozen=True)
class OddOne:
    """A request that gives what no other cell gives of the same prompt."""

    cell: str
    request: str
    position: int
    distance_nats: float
    limit_nats: float
    cells: int

    def __str__(self) -> str:
        return (
            f"{self.cell}: {self.request}[{self.position}] is {number(self.distance_nats)} nats from "
            f"the nearest of {self.cells - 1} other cells with this prompt, expected "
            f"{number(self.limit_nats)} at most"
        )


def odd_ones(found: Sequence[Record[Any]]) -> list[OddOne]:
    """Return the requests of a run that stand out, the farthest first, each at its worst position."""
    odd: dict[tuple[str, str], OddOne] = {}
    for members, precision in _groups(found):
        for one in _odd_of(members, precision):
            place = (one.cell, one.request)
            if place not in odd or odd[place].distance_nats < one.distance_nats:
                odd[place] = one
    return sorted(odd.values(), key=lambda one: -one.distance_nats)


def sentences(found: Sequence[Record[Any]]) -> list[str]:
    """Return a sentence for each request of a run that stands out: each fails the run."""
    return [f"odd one out: {one}" for one in odd_ones(found)]


def _groups(found: Sequence[Record[Any]]) -> Iterator[tuple[list[Member], tolerance.Precision]]:
    """Yield requests with one prompt, checkpoint and precision, and that precision."""
    groups: defaultdict[tuple[Any, ...], list[Member]] = defaultdict(list)
    for record in found:
        seen, reference, corpus = record.observation, record.reference, record.corpus
        if not isinstance(seen, EngineObservation) or reference is None or corpus is None:
            continue
        settings = ParitySettings.recorded(record.settings)
        if settings.measure_only is not None or len(reference.requests) != len(seen.requests):
            continue
        for request, scores in zip(seen.requests, reference.requests, strict=True):
            if scores.roundings is not None:
                prompt = tuple(corpus.token_ids[request.prompt])
                served = (settings.precision, seen.facts.quantization)
                key = (reference.checkpoint_sha256, *served, prompt)
                groups[key].append(Member(record.cell, request, scores))
    for key, members in groups.items():
        if len({one.cell for one in members}) >= _FEWEST_CELLS:
            yield members, tolerance.precision(key[1])


def _odd_of(members: list[Member], precision: tolerance.Precision) -> Iterator[OddOne]:
    position = 0
    while len({one.cell for one in members}) >= _FEWEST_CELLS:
        given = [one.request.token_ids[position] for one in members]
        token, _ = Counter(given).most_common(1)[0]
        scored = next(one for one, own in zip(members, given, strict=True) if own == token).scores
        limit = _limit(scored, position, precision)
        logprobs = np.array([_logprob(one.request, position, token) for one in members])
        cells = np.array([one.cell for one in members])
        for one, own in zip(members, logprobs, strict=True):
            distance = float(np.abs(logprobs[cells != one.cell] - own).min())
            if not distance <= limit:
                count = len(set(cells))
                yield OddOne(one.cell, one.request.id, position, distance, limit, count)
        position += 1
        members = [
            one
            for one, own in zip(members, given, strict=True)
            if own == token and len(one.request.token_ids) > position
        ]


def _limit(scores: RequestScores, position: int, precision: tolerance.Precision) -> float:
    """The budget of the position, or what a tip does anywhere in the sequence."""
    assert scores.roundings is not None
    if not precision.has_ties:
        worsts = [max(one) for one in scores.roundings["decode_logprob_error"]]
        return tolerance.FP32_FACTOR * tolerance.fp32_floor(worsts)
    floors = np.array(scores.roundings["decode_logprob_error"]).max(0)
    magnitude = scores.reference.max_abs_logit[position]
    step = float(tolerance.resolution(magnitude, precision.mantissa_bits))
    own = float(tolerance.budget("decode_logprob_error", floors[position], step))
    return max(own, float(floors.max()) + step)


def _logprob(request: RequestObservation, position: int, token: int) -> float:
    """The logprob of a token; where it is not among the likeliest, that of the last of these."""
    top = dict(zip(request.top_token_ids[position], request.top_logprobs[position], strict=True))
    return top.get(token, min(top.values()))
