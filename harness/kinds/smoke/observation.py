# SPDX-License-Identifier: Apache-2.0
"""What a smoke cell sees: prompts' logprobs, answers of a server, or when its tokens came."""

from __future__ import annotations

from typing import Any, Literal

from harness.evidence.base import Evidence, Observation
from harness.evidence.engine import EngineFacts, PromptLogprobs
from harness.evidence.repetitions import RepetitionsOfRounds


class PromptObservation(Observation):
    """Prompt logprobs of an engine."""

    kind: Literal["prompt"] = "prompt"
    settings: EngineFacts
    prompts: list[PromptLogprobs]
    run_s: float
    repetitions: RepetitionsOfRounds = []


class FunctionCall(Evidence):
    """A tool call as a client got it; the arguments are the text that was sent."""

    name: str
    arguments: str


class ServedAnswer(Evidence):
    """One answer of a server, and what of its request decides how it must look."""

    prompt: str
    streamed: bool
    enable_thinking: bool
    tools: list[dict[str, Any]]
    after_tool_result: bool
    reasoning: str | None
    content: str | None
    tool_calls: list[FunctionCall]
    finish_reason: str | None
    completion_tokens: int


class ServedObservation(Observation):
    """Answers of a server to chat requests."""

    kind: Literal["served"] = "served"
    answers: list[ServedAnswer]
    run_s: float


class ServedStream(Evidence):
    """One streamed completion, as a client saw it; times are counted from the start of its round."""

    round: int
    prompt_tokens: int
    completion_tokens: int
    sent_ms: float
    first_token_ms: float
    last_token_ms: float


class TimingObservation(Observation):
    """Rounds of equal streams that a client held open at once."""

    kind: Literal["timing"] = "timing"
    streams: list[ServedStream]
