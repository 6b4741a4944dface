# SPDX-License-Identifier: Apache-2.0
"""The clients of a soak: they come and go at random, and each answer is held against that alone.

A client pauses, draws what to do, does it, and pauses again, until the time is over. All draws come
from the cell's seed; what the server makes of the order in which they arrive is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import openai

from harness.kinds.soak.child.requests import BadRequest, GoodRequest
from harness.kinds.soak.observation import Difference, Minute, Percentiles, RequestCounts
from harness.kinds.soak.settings import GOOD_KINDS, Clients
from harness.serving import client
from harness.serving.answers import Answer, Assembly, ProtocolError, answers

Outcome = dict[str, Any]
"""An answer as a client reads it, without what is its own each time (ids of calls, times)."""

_KEPT_DIFFERENCES = 5
_KEPT_ERRORS = 20
_LONGEST_ERROR = 300
_PIECES = 12  # a disconnect comes after a random number of pieces up to this
_FEW = 5  # fewer times than this have no percentiles


@dataclass(frozen=True)
class Pace:
    """How fast time goes for the clients of a soak.

    Attributes:
        patience_s: an abort comes at a random time before this: in the queue, prefill or decoding.
        linger_s: longest that a process may outlive its server.
        clock: what tells how long the traffic has gone on, in seconds.
    """

    patience_s: float = 0.5
    linger_s: float = 10.0
    clock: Callable[[], float] = time.monotonic


class Latencies:
    """Times of streams, by minute and since they were last asked for."""

    def __init__(self) -> None:
        self._minutes: dict[int, tuple[array[float], array[float]]] = {}
        self._recent: tuple[list[float], list[float]] = ([], [])

    def add(self, minute: int, ttft_ms: float, itl_ms: Sequence[float]) -> None:
        """Take the times of a stream that ended in a minute."""
        first, between = self._minutes.setdefault(minute, (array("d"), array("d")))
        first.append(ttft_ms)
        between.extend(itl_ms)
        self._recent[0].append(ttft_ms)
        self._recent[1].extend(itl_ms)

    def recent(self) -> tuple[float | None, float | None]:
        """Return the medians of TTFT and ITL, ms, since the last call."""
        first, between = (float(np.median(times)) if times else None for times in self._recent)
        self._recent = ([], [])
        return first, between

    def minutes(self) -> list[Minute]:
        """Return what each minute was like."""
        return [
            Minute(
                minute=minute,
                streams=len(first),
                ttft_ms=_percentiles(first),
                itl_ms=_percentiles(between),
            )
            for minute, (first, between) in sorted(self._minutes.items())
        ]


class Traffic:
    """Clients of one server, and the count of what they met.

    Args:
        base_url: of the server, without a path.
        good, bad: what they ask; the good ones by kind.
        soak: the cell's settings of that name.
        pace: of the clients.
    """

    def __init__(
        self,
        base_url: str,
        good: Mapping[str, Sequence[GoodRequest]],
        bad: Sequence[BadRequest],
        soak: Clients,
        pace: Pace,
    ) -> None:
        self._api = client.connect_async(base_url)
        self.http = openai.DefaultAsyncHttpxClient(
            base_url=base_url, timeout=client.TIMEOUT_S, trust_env=False
        )
        self._good, self._bad, self._soak, self._pace = good, bad, soak, pace
        self._counts: dict[str, Counter[str]] = {kind: Counter() for kind in soak.mix}
        self._alone: dict[str, Outcome] = {}
        self._in_flight = 0
        self._began = 0.0
        self._over = False
        self.latencies = Latencies()
        self.peak_in_flight = 0
        self.completed = 0
        self.completion_tokens = 0
        self.different = 0
        self.unstable = 0
        self.differences: list[Difference] = []
        self.error_count = 0
        self.errors: list[str] = []

    @property
    def counts(self) -> dict[str, RequestCounts]:
        """What became of the requests of each kind."""
        names = RequestCounts.model_fields
        return {
            kind: RequestCounts(**{name: found[name] for name in names})
            for kind, found in self._counts.items()
        }

    async def ask_alone(self) -> None:
        """Ask each good request once, with no other in the server; the answers are the measure.

        Raises:
            openai.OpenAIError: one was not answered: the soak has nothing to compare with.
        """
        for one in self._requests():
            self._alone[one.name] = await self._whole(one)

    async def ask_alone_again(self) -> None:
        """Ask them once more, and note which answers are others now."""
        for one in self._requests():
            with self._fault_noted("alone again", one.name):
                found = await self._whole(one)
                if found != self._alone[one.name]:
                    self.unstable += 1
                    self._keep(one.name, "alone, after the traffic", found)

    async def run(self) -> None:
        """Let the clients ask until the cell's time is over and the last answer is there."""
        self._began = self._pace.clock()
        clients = [self._client(number) for number in range(self._soak.concurrency)]
        await asyncio.gather(*clients)

    def end(self) -> None:
        """Have every client stop after what it asks now: the server is gone."""
        self._over = True

    async def close(self) -> None:
        """Close every connection."""
        await self._api.close()
        await self.http.aclose()

    def elapsed_s(self) -> float:
        """Seconds since the traffic began."""
        return self._pace.clock() - self._began

    def note_error(self, text: str) -> None:
        """Count something that is no client's fault."""
        self.error_count += 1
        if len(self.errors) < _KEPT_ERRORS:
            self.errors.append(text[:_LONGEST_ERROR])

    def _requests(self) -> Iterator[GoodRequest]:
        for kind in GOOD_KINDS:
            yield from self._good[kind]

    async def _client(self, number: int) -> None:
        draw = Random(f"{self._soak.seed}/{number}")
        kinds, weights = zip(*self._soak.mix.items(), strict=True)
        while True:
            await asyncio.sleep(draw.expovariate(1 / self._soak.pause_s))
            if self._over or self.elapsed_s() >= self._soak.duration_s:
                return
            (kind,) = draw.choices(kinds, weights)
            self._in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
            self._counts[kind]["sent"] += 1
            try:
                await self._do(kind, draw)
            finally:
                self._in_flight -= 1

    async def _do(self, kind: str, draw: Random) -> None:
        if kind == "bad":
            bad = draw.choice(self._bad)
            with self._fault_noted(kind, bad.name):
                await self._ask_bad(bad)
            return
        leaves = kind not in GOOD_KINDS
        one = draw.choice(self._good[draw.choice(GOOD_KINDS) if leaves else kind])
        with self._fault_noted(kind, one.name):
            if kind == "disconnect":
                found = await self._streamed(one, pieces=draw.randint(1, _PIECES))
            elif kind == "abort":
                found = await self._aborted(one, draw.uniform(0.0, self._pace.patience_s))
            elif draw.random() < self._soak.streamed:
                found = await self._streamed(one)
            else:
                found = await self._whole(one)
            if found is None:
                self._counts[kind]["left"] += 1
            else:
                self._compare(kind, one, found)

    def _compare(self, kind: str, one: GoodRequest, found: Outcome) -> None:
        self._counts[kind]["completed"] += 1
        self.completed += 1
        self.completion_tokens += found["completion_tokens"]
        if found != self._alone[one.name]:
            self.different += 1
            self._keep(one.name, f"in traffic, {self.elapsed_s():.0f} s after it began", found)

    def _keep(self, name: str, when: str, found: Outcome) -> None:
        if len(self.differences) < _KEPT_DIFFERENCES:
            self.differences.append(
                Difference(request=name, when=when, alone=self._alone[name], found=found)
            )

    @contextlib.contextmanager
    def _fault_noted(self, kind: str, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no client's fault
            if kind in self._counts:
                self._counts[kind]["failed"] += 1
            self.note_error(f"{kind} {name}: {type(error).__name__}: {error}")

    async def _ask_bad(self, bad: BadRequest) -> None:
        if isinstance(bad.body, str):
            headers = {"content-type": "application/json"}
            response = await self.http.post(bad.path, content=bad.body, headers=headers)
        else:
            response = await self.http.post(bad.path, json=bad.body)
        if response.status_code != bad.status:
            raise ProtocolError(
                f"expected status {bad.status}, found {response.status_code}: {response.text}"
            )
        self._counts["bad"]["refused"] += 1

    async def _whole(self, one: GoodRequest) -> Outcome:
        if one.chat:
            completion = await self._api.chat.completions.create(stream=False, **one.body)
            (answer,) = answers(completion)
            return _chat_outcome(answer)
        found = await self._api.completions.create(stream=False, **one.body)
        choice = found.choices[0]
        return _text_outcome(choice.text, choice.finish_reason, found.usage)

    async def _aborted(self, one: GoodRequest, patience_s: float) -> Outcome | None:
        """Ask, and give up after a time; return the answer if it came before."""
        try:
            return await asyncio.wait_for(self._whole(one), patience_s)
        except asyncio.TimeoutError:
            return None

    async def _streamed(self, one: GoodRequest, pieces: int | None = None) -> Outcome | None:
        """Ask for a stream, and put it together or leave it after some pieces.

        Returns:
            the answer, None where it was left before its end.
        """
        create = self._api.chat.completions.create if one.chat else self._api.completions.create
        usage: Any = {"include_usage": True}
        assembly, text, finish, counted = Assembly(), [], None, None
        times = [time.perf_counter()]
        async with await create(stream=True, stream_options=usage, **one.body) as stream:
            async for chunk in stream:
                counted = chunk.usage or counted
                if chunk.choices:
                    times.append(time.perf_counter())
                if one.chat:
                    assembly.add(chunk)
                elif chunk.choices:
                    text.append(chunk.choices[0].text)
                    finish = chunk.choices[0].finish_reason or finish
                if pieces is not None and len(times) > pieces:
                    return None
        if counted is None or len(times) == 1:
            raise ProtocolError("a stream ended without a piece, or without its usage")
        between = [1e3 * (after - before) for before, after in itertools.pairwise(times[1:])]
        minute = int(self.elapsed_s() // 60)
        self.latencies.add(minute, 1e3 * (times[1] - times[0]), between)
        if one.chat:
            (answer,) = assembly.answers()
            return _chat_outcome(answer)
        return _text_outcome("".join(text), finish, counted)


def _chat_outcome(answer: Answer) -> Outcome:
    found = {key: value for key, value in answer.outcome.items() if key != "tokens"}
    calls = [list(call) for call in found["tool_calls"]]  # as JSON has them
    return found | {"tool_calls": calls, "completion_tokens": answer.usage.completion_tokens}


def _text_outcome(text: str, finish_reason: str | None, usage: Any) -> Outcome:
    return {
        "text": text,
        "finish_reason": finish_reason,
        "completion_tokens": usage.completion_tokens,
    }


def _percentiles(times: Sequence[float]) -> Percentiles | None:
    if len(times) < _FEW:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(times, [50, 90, 99]))
    return Percentiles(p50=round(p50, 3), p90=round(p90, 3), p99=round(p99, 3))
