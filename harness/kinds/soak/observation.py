# SPDX-License-Identifier: Apache-2.0
"""What a soak cell sees: what became of every request, and of the server."""

from __future__ import annotations

from typing import Any, Literal

from harness.evidence.base import Evidence, Observation


class RequestCounts(Evidence):
    """What became of the requests of one kind.

    Attributes:
        sent: by a client, whole or streamed.
        completed: answered to the end, and compared with the answer given alone.
        refused: answered with the 4xx that is right for them.
        left: disconnected or aborted by the client, as it meant to.
        failed: all else; `SoakObservation.errors` says how.
    """

    sent: int
    completed: int
    refused: int
    left: int
    failed: int


class Difference(Evidence):
    """A request whose answer is not the one it gets alone; both answers as a client reads them."""

    request: str
    when: str  # in the traffic, and how long after it began, or alone after it
    alone: dict[str, Any]
    found: dict[str, Any]


class Percentiles(Evidence):
    """Of times in milliseconds."""

    p50: float
    p90: float
    p99: float


class Minute(Evidence):
    """Latency of the answers that ended in one minute; None where too few came to tell."""

    minute: int
    streams: int
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None


class Sample(Evidence):
    """The server at one moment, and what ended since the sample before.

    Attributes:
        t_s: since the traffic began.
        rss_bytes: resident memory of the server's processes.
        card_bytes: memory in use on all cards, whoever uses it; None without one.
        running, waiting: requests, as the scheduler counts them.
        kv_cache_usage: share of the pool, 0 to 1; the fullest engine's.
        preemptions: since the server started.
        completed, ttft_ms, itl_ms: answers that ended, and the medians of those streamed.
    """

    t_s: float
    rss_bytes: int
    card_bytes: int | None
    running: int
    waiting: int
    kv_cache_usage: float
    preemptions: int
    completed: int
    ttft_ms: float | None
    itl_ms: float | None


class SoakObservation(Observation):
    """Traffic of many clients, mixed, and what it left of the server.

    Attributes:
        run_s: from the first request of the traffic to the end of the last.
        peak_in_flight: requests that clients had open at once, at most.
        requests: by kind.
        different, unstable: answers that differ from those given alone: in the traffic, and of the
            same requests alone after it. The first ones are in `differences`, in full.
        error_count: what was no client's fault; the first ones are in `errors`.
        counters: by vLLM's name, what the server added in the traffic; over its engines.
        finished_by_engine: requests that each engine of the server finished.
        healthy: it answered its health check when all was over.
        stopped: it ended in time when it was asked to.
        orphans: its processes that outlived it.
    """

    kind: Literal["soak"] = "soak"
    run_s: float
    peak_in_flight: int
    requests: dict[str, RequestCounts]
    different: int
    unstable: int
    differences: list[Difference]
    error_count: int
    errors: list[str]
    minutes: list[Minute]
    samples: list[Sample]
    counters: dict[str, float]
    finished_by_engine: dict[str, int]
    completion_tokens: int
    healthy: bool
    stopped: bool
    orphans: list[str]
