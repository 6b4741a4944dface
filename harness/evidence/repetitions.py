# SPDX-License-Identifier: Apache-2.0
"""How a round came back that was asked several times: counts, and of what differed the worst."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from harness.evidence.base import Evidence


class OtherRows(Evidence):
    """Rows of one request that came back with other bits than usually, in one time of its round.

    Row `r` of a request is computed of its tokens up to the one at `r`, and predicts the next.

    Attributes:
        time: which of the round's, from 0.
        count: of these rows.
        rows: the first of them.
        first_generated: the row that gives the request's first token, the last one of the prefill.
        spread_nats: largest difference of a logprob from the usual one; infinite where a row shares
            no token with it.
    """

    time: int
    request: str
    count: int
    rows: list[int]
    first_generated: int
    spread_nats: float


class Repetitions(Evidence):
    """A round that was asked several times, the same requests in the same order.

    What came back most often at a row is *usual* there. Of a request whose token was another one, later
    rows of that time are not compared: they follow another text.

    Attributes:
        times: how often it was asked, the first included.
        rows: compared each time.
        other_rows: all that were not as usual, over all times.
        other_prefill_rows: those of them that a prefill gave.
        distinct_rows: those of them, a row that differs in several times counted once.
        other_times: in which there were any.
        spread_nats: the largest of all.
        others: those of largest spread; there may be more.
        same_steps: times whose engine steps were made up as the first one's, itself included.
        same_hits: times with as many cached tokens of each request as the first one, itself included.
    """

    round: int
    times: int
    rows: int
    other_rows: int
    other_prefill_rows: int
    distinct_rows: int
    other_times: int
    spread_nats: float
    others: list[OtherRows]
    same_steps: int
    same_hits: int


RepetitionsOfRounds = Annotated[list[Repetitions], Field(exclude_if=lambda found: not found)]
"""Of the rounds that were asked several times; left out of a record where there are none, as before
December 2026."""
