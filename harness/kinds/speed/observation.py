# SPDX-License-Identifier: Apache-2.0
"""What a speed cell sees: rounds of equal requests, timed, and what bounds them."""

from __future__ import annotations

from typing import Literal

from harness.evidence.base import Evidence, Observation
from harness.evidence.engine import EngineFacts


class Kernel(Evidence):
    """One CUDA kernel, or operator on a CPU, in a decode step, on average over those profiled."""

    name: str
    calls: float
    total_us: float


class SpeedRound(Evidence):
    """One round: equal requests that arrived together, driven step by step."""

    first_token_ms: float
    last_token_ms: float
    steps: int  # that gave tokens
    tokens: list[int]  # generated, by request
    last_token_ids: list[int]


class SpeedObservation(Observation):
    """Speed of an engine in its own process, and what bounds it.

    Attributes:
        startup_s: from the start of the process until the engine was ready.
        memory_bytes: in use on the card, or by the process on a CPU.
        copy_bytes_s: of a copy within the device's memory, bytes read and written, in this run.
        bytes_moved: least number of bytes that a decode step, or the prefill, must move.
        distinct_experts: chosen in a layer by the tokens of a step, and expected of even routing.
    """

    kind: Literal["speed"] = "speed"
    settings: EngineFacts
    rounds: list[SpeedRound]
    prompt_tokens: int
    startup_s: float
    memory_bytes: int
    copy_bytes_s: float
    bytes_moved: int
    distinct_experts: tuple[float, float]
    kernels: list[Kernel]
