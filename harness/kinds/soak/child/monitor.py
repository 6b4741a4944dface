# SPDX-License-Identifier: Apache-2.0
"""What a soak sees of its server beside the answers: memory, counters, and what outlives it.

Memory is that of the server's process group, and of the cards as the driver counts it; requests and the
cache are the server's own account (`/metrics`, vllm/v1/metrics/loggers.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from harness.machine import cards_memory_bytes

COUNTERS = (
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
)
"""Counters whose growth is kept, summed over engines."""

_FINISHED = "vllm:request_success"
_METRICS_S = 30.0  # longest wait for `/metrics`


@dataclass
class Metrics:
    """What `/metrics` says: counters and gauges, by name and engine."""

    values: dict[str, dict[str, float]] = field(default_factory=dict)

    def total(self, name: str) -> float:
        """Sum over the engines; 0 for what the server has not counted yet."""
        return sum(self.values.get(name, {}).values())

    def largest(self, name: str) -> float:
        """The largest of the engines' values."""
        return max(self.values.get(name, {}).values(), default=0.0)

    @property
    def finished(self) -> dict[str, float]:
        """Requests that ended, by engine, for whatever reason."""
        return self.values.get(_FINISHED, {})


def parse_metrics(text: str) -> Metrics:
    """Read what a Prometheus endpoint says, leaving histograms out."""
    found = Metrics()
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "gauge"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            by_engine = found.values.setdefault(family.name, {})
            engine = sample.labels.get("engine", "0")
            by_engine[engine] = by_engine.get(engine, 0.0) + sample.value
    return found


async def read_metrics(http: openai.DefaultAsyncHttpxClient) -> Metrics:
    """Ask a server for its metrics.

    Raises:
        Exception: of the HTTP client's own kind; the server does not answer, or not with them.
    """
    response = await http.get("/metrics", timeout=_METRICS_S)
    return parse_metrics(response.raise_for_status().text)


def group_members(leader: int) -> list[psutil.Process]:
    """Return the processes of a process group, and all descendants of its leader."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(leader).children(recursive=True):
            found[child.pid] = child
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if pid not in found and os.getpgid(pid) == leader:
                found[pid] = psutil.Process(pid)
    return list(found.values())


def memory(leader: int) -> tuple[int, int | None]:
    """Return resident bytes of a server's processes, and bytes in use on all cards if any."""
    return sum(_resident(group_members(leader))), cards_memory_bytes()


def survivors(processes: list[psutil.Process], linger_s: float) -> list[str]:
    """Return the processes that do not end in time, by id and command."""
    _, alive = psutil.wait_procs(processes, timeout=linger_s)
    found = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


def _resident(processes: list[psutil.Process]) -> Iterator[int]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            yield process.memory_info().rss
