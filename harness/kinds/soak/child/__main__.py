# SPDX-License-Identifier: Apache-2.0
"""The child of a soak matrix: `vllm serve` under mixed traffic, watched, and what it leaves behind.

Run as `python -m harness.kinds.soak.child CONFIG` by harness/run/cells.py. Every request is asked alone first;
then clients come and go for the cell's time while memory and latency are sampled; then every request
is asked alone again, the server is asked to stop, and processes that outlive it are written down.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.checkpoints.folder import vocab_size
from harness.evidence.record import Gathered
from harness.kinds.soak.child.clients import Pace, Traffic
from harness.kinds.soak.child.monitor import (
    COUNTERS,
    Metrics,
    group_members,
    memory,
    read_metrics,
    survivors,
)
from harness.kinds.soak.child.requests import bad_requests, good_requests
from harness.kinds.soak.observation import Sample, SoakObservation
from harness.kinds.soak.settings import SoakSettings
from harness.process import child_loop
from harness.serving.server import Server, started_for_cells

_REAL_TIME = Pace()


def build(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Start a server; each cell ends the one that it met, and a later one starts its own.

    Args:
        config: `settings` of one of the cells, `model` (a checkpoint's folder), `on_card` and
            `server_log`.
    """
    model, log = Path(config["model"]), Path(config["server_log"])
    shared = SoakSettings.model_validate(config["settings"])

    def start() -> Server:
        args, start_s = shared.engine.args, shared.timeout.start_s
        return started_for_cells(model, log, args, start_s, config["on_card"])

    ready = [start()]
    size = vocab_size(model)

    def handle(job: dict[str, Any]) -> BaseModel:
        settings = SoakSettings.model_validate(job["settings"])
        server = ready.pop() if ready else start()
        try:
            seen = asyncio.run(observe(server, size, settings))
            return Gathered[SoakObservation](observation=seen)
        finally:
            server.stop()

    return {}, handle


async def observe(
    server: Server, size: int, settings: SoakSettings, pace: Pace = _REAL_TIME
) -> SoakObservation:
    """Soak a running server, which has ended when this returns, or was asked to in vain.

    Args:
        size: of the vocabulary of the model that it serves.
        settings: the cell's.
        pace: of its clients.
    """
    soak = settings.soak
    context = settings.engine.args["max_model_len"]
    processes = set(group_members(server.pid))
    traffic = Traffic(
        server.base_url,
        good_requests(server.model, size, soak),
        bad_requests(server.model, context),
        soak,
        pace,
    )
    samples: list[Sample] = []
    try:
        await traffic.ask_alone()
        before = await read_metrics(traffic.http)
        sampling = asyncio.create_task(_sample(server, traffic, soak.sample_s, samples))
        await traffic.run()
        run_s = traffic.elapsed_s()
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
        after = await _metrics(traffic) or before
        await traffic.ask_alone_again()
    finally:
        await traffic.close()
    healthy = server.healthy()
    processes |= set(group_members(server.pid))
    stopped = server.ask_to_stop()
    return SoakObservation(
        run_s=run_s,
        peak_in_flight=traffic.peak_in_flight,
        requests=traffic.counts,
        different=traffic.different,
        unstable=traffic.unstable,
        differences=traffic.differences,
        error_count=traffic.error_count,
        errors=traffic.errors,
        minutes=traffic.latencies.minutes(),
        samples=samples,
        counters={name: after.total(name) - before.total(name) for name in COUNTERS},
        finished_by_engine={
            engine: round(count - before.finished.get(engine, 0.0))
            for engine, count in after.finished.items()
        },
        completion_tokens=traffic.completion_tokens,
        healthy=healthy,
        stopped=stopped,
        orphans=survivors(list(processes), pace.linger_s),
    )


async def _sample(server: Server, traffic: Traffic, every_s: float, found: list[Sample]) -> None:
    """Look at the server again and again; end the traffic when it is gone."""
    completed = traffic.completed
    while server.alive:
        await asyncio.sleep(every_s)
        metrics = await _metrics(traffic)
        if metrics is None:
            continue
        rss_bytes, card_bytes = await asyncio.to_thread(memory, server.pid)
        ttft_ms, itl_ms = traffic.latencies.recent()
        sample = Sample(
            t_s=traffic.elapsed_s(),
            rss_bytes=rss_bytes,
            card_bytes=card_bytes,
            running=round(metrics.total("vllm:num_requests_running")),
            waiting=round(metrics.total("vllm:num_requests_waiting")),
            kv_cache_usage=metrics.largest("vllm:kv_cache_usage_perc"),
            preemptions=round(metrics.total("vllm:num_preemptions")),
            completed=traffic.completed - completed,
            ttft_ms=ttft_ms,
            itl_ms=itl_ms,
        )
        completed = traffic.completed
        found.append(sample)
        print(
            f"{sample.t_s:.0f} s: {sample.running} running, {sample.waiting} waiting, "
            f"{completed} completed, {traffic.different} different, {traffic.error_count} errors, "
            f"{sample.preemptions} preemptions, {rss_bytes / 2**20:.0f} MiB",
            flush=True,
        )
    traffic.end()


async def _metrics(traffic: Traffic) -> Metrics | None:
    """Ask for the metrics; that they do not come is an error like any other."""
    try:
        return await read_metrics(traffic.http)
    except Exception as error:  # noqa: BLE001 - of any kind of HTTP client
        traffic.note_error(f"metrics: {type(error).__name__}: {error}")
        return None


if __name__ == "__main__":
    child_loop.main(build)
