# SPDX-License-Identifier: Apache-2.0
"""The child of a parser matrix: replays the scripted turns through vLLM's serving layer, one cell's way.

Run as `python -m harness.kinds.parser.child CONFIG` by harness/run/cells.py. A cell fixes the delta size,
what came before the turn, the mode, the tool choice, and whether the turn is cut short. Every turn
is given whole and streamed: both must be the right answer, and when the turn is cut at a token,
both must be the same beginning of it with `finish_reason: "length"`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.checkpoints.taught import lessons_of
from harness.evidence.record import Gathered
from harness.files import digest
from harness.kinds.parser.observation import ParserObservation
from harness.kinds.parser.settings import ParserSettings, ReplayedTurns
from harness.process import child_loop
from harness.prompts.conversations import Turn, conversations
from harness.serving.replay import ALL, WHOLE, Replay, ScriptedEngine

# What came before: a call and its result, and talk that quotes the format's own tags.
_HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "What do <think> and </think> mean in a prompt?"},
    {
        "role": "assistant",
        "reasoning": "They quote tags; I look </think> up.",
        "content": "",
        "tool_calls": [
            {
                "id": "call_before",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"word": "<function=think>"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_before", "content": "</think> ends a thought"},
    {"role": "assistant", "reasoning": "Found.", "content": "`</think>` ends a thought."},
]


class ReplayCells:
    """Answers jobs with the tokenizer and the template of one checkpoint."""

    def __init__(self, folder: Path):
        self._engine = ScriptedEngine(folder)
        self._replay = Replay(self._engine)
        self._written = {
            turn.id: lessons_of(turn, self._engine.tokenizer)[0].answer for turn in conversations()
        }
        self._wholes: dict[str, dict[str, Any]] = {}

    def handle(self, job: dict[str, Any]) -> BaseModel:
        """Replay every turn that the cell is about."""
        cell = ParserSettings.model_validate(job["settings"]).parser
        started = time.monotonic()
        turns = [
            turn for turn in conversations() if turn.enable_thinking == (cell.mode == "thinking")
        ]
        faults: list[str] = []
        comparisons = 0
        for turn in turns:
            for fault in self._compare(turn, cell):
                comparisons += 1
                if fault:
                    faults.append(fault)
        observation = ParserObservation(
            cases=len(turns),
            comparisons=comparisons,
            faults=faults,
            run_s=time.monotonic() - started,
        )
        return Gathered[ParserObservation](observation=observation)

    def _compare(self, turn: Turn, cell: ReplayedTurns) -> Iterator[str | None]:
        """A fault or None for each answer that was looked at."""
        written = self._written[turn.id]
        size = ALL if cell.delta_size == "all" else cell.delta_size
        request: dict[str, Any] = {
            "messages": [*(_HISTORY if cell.history == "turns" else []), *turn.messages],
            "chat_template_kwargs": turn.chat_template_kwargs,
        }
        if turn.tools:
            request |= {"tools": turn.tools, "tool_choice": cell.tool_choice}
        right = _outcome(turn, cell.tool_choice)
        if cell.truncation == "none":
            for delta in (WHOLE, size):
                found = self._found(request, written, delta)
                yield _difference(f"{turn.id}, {_delivery(delta)}", right, found)
            return
        for length in range(1, len(written)):
            cut = request | {"max_completion_tokens": length}
            whole, streamed = (self._found(cut, written, delta) for delta in (WHOLE, size))
            place = f"{turn.id}, cut after {length} tokens"
            yield _difference(f"{place}, {_delivery(size)} beside whole", whole, streamed)
            yield _not_the_beginning(place, right, whole)

    def _found(
        self, request: dict[str, Any], written: list[int], delta_size: int
    ) -> dict[str, Any]:
        """What a client gets; whole answers are those of an earlier cell that asked the same."""
        key = digest([request, written])
        if delta_size == WHOLE and key in self._wholes:
            return self._wholes[key]
        (answer,) = self._replay.answers(request, [written], delta_size)
        calls = [[name, json.loads(arguments)] for name, arguments in answer.said["tool_calls"]]
        found = answer.said | {"tool_calls": calls}
        if delta_size == WHOLE:
            self._wholes[key] = found
        return found


def _outcome(turn: Turn, tool_choice: str) -> dict[str, Any]:
    calls = [] if tool_choice == "none" else turn.calls
    return {
        "reasoning": turn.reasoning or None,
        "content": turn.content or None,
        "tool_calls": [list(call) for call in calls],
        "finish_reason": "tool_calls" if calls else "stop",
    }


def _difference(place: str, right: dict[str, Any], found: dict[str, Any]) -> str | None:
    different = [
        f"{key}: expected {right[key]!r}, found {found[key]!r}"
        for key in right
        if right[key] != found[key]
    ]
    return f"{place}: {'; '.join(different)}" if different else None


def _not_the_beginning(place: str, right: dict[str, Any], cut: dict[str, Any]) -> str | None:
    """What a cut answer holds that the whole one does not begin with."""
    faults = [
        f"{key} {cut[key]!r} does not begin {right[key]!r}"
        for key in ("reasoning", "content")
        if not (right[key] or "").startswith((cut[key] or "").rstrip())
    ]
    if cut["finish_reason"] != "length":
        faults.append(f"finish_reason is {cut['finish_reason']}")
    names = [name for name, _ in right["tool_calls"]]
    if [name for name, _ in cut["tool_calls"]] != names[: len(cut["tool_calls"])]:
        faults.append(f"calls {cut['tool_calls']!r} do not begin {names!r}")
    return f"{place}: {'; '.join(faults)}" if faults else None


def _delivery(delta_size: int) -> str:
    return {WHOLE: "whole", ALL: "streamed at once"}.get(delta_size, f"streamed by {delta_size}")


def build(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Build the serving layer of a checkpoint; `config` names its folder as `model`."""
    return {}, ReplayCells(Path(config["model"])).handle


if __name__ == "__main__":
    child_loop.main(build)
