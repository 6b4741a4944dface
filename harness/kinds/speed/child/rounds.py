# SPDX-License-Identifier: Apache-2.0
"""Rounds of equal requests on an engine: when their tokens came, and what a decode step runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams

from harness.engine import Engine
from harness.kinds.speed.observation import Kernel, SpeedRound

_LONGEST_KERNELS = 40


def run_round(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> SpeedRound:
    """Generate `max_tokens` for prompts that arrive together, and time the steps."""
    started = time.perf_counter()
    requests = engine.requests(prompts, _greedy(max_tokens))
    ids_by_request: dict[str, list[int]] = {request.name: [] for request in requests}
    first_ms = last_ms = 0.0
    steps = 0
    for outputs in engine.steps(requests):
        if not outputs:
            continue  # scheduled ahead: the tokens come with the next step
        steps += 1
        last_ms = 1e3 * (time.perf_counter() - started)
        for output in outputs:
            ids_by_request[output.request_id] = list(output.outputs[0].token_ids)
        if not first_ms and all(ids_by_request.values()):
            first_ms = last_ms
    return SpeedRound(
        first_token_ms=first_ms,
        last_token_ms=last_ms,
        steps=steps,
        tokens=[len(ids) for ids in ids_by_request.values()],
        last_token_ids=[ids[-1] for ids in ids_by_request.values()],
    )


def profile_decode(engine: Engine, prompts: Sequence[Sequence[int]], steps: int) -> list[Kernel]:
    """Return what a decode step of these prompts runs, longest first."""
    on_card = torch.cuda.is_available()
    given = engine.steps(engine.requests(prompts, _greedy(steps + 8)))
    while len(next(given)) < len(prompts):
        pass  # until every prompt has its first token
    next(given)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_card else activity.CPU]) as seen:
        for _ in range(steps):
            next(given)
        if on_card:
            torch.cuda.synchronize()
    for _ in given:
        pass  # to the end: the engine must be idle for the next cell
    kernels = [
        Kernel(
            name=event.key,
            calls=event.count / steps,
            total_us=(event.self_device_time_total if on_card else event.self_cpu_time_total)
            / steps,
        )
        for event in seen.key_averages()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.total_us)[:_LONGEST_KERNELS]


def _greedy(max_tokens: int) -> Any:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
