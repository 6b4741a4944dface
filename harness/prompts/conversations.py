# SPDX-License-Identifier: Apache-2.0
"""The conversations that a taught checkpoint knows by heart, as tests and clients use them.

They live in `conversations.yaml`. Every assistant message there becomes one `Turn`: the request that asks
for it, and what the answer is. Needs neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

SCRIPT = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One request and its right answer.

    Attributes:
        id: the conversation's, with `/2`, `/3` for its later turns.
        messages: the request's, in the format of chat completions.
        tools: the request's, likewise; empty where none are declared.
        enable_thinking: the one chat template argument in use.
        reasoning, content, tool_calls: the answer as a client gets it.
        text: what the model writes after the prompt, where the template would render another.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    enable_thinking: bool
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    text: str | None = None

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        return {} if self.enable_thinking else {"enable_thinking": False}

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """The name and the arguments of each call."""
        return [(call.name, call.arguments) for call in self.tool_calls]

    @cached_property
    def message(self) -> dict[str, Any]:
        """The answer as the message that a client sends back."""
        calls = [
            {
                "id": f"call_{self.id}_{index}".replace("/", "_"),
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for index, call in enumerate(self.tool_calls)
        ]
        message = {"role": "assistant", "content": self.content, "reasoning": self.reasoning}
        return message | ({"tool_calls": calls} if calls else {})


def conversations() -> list[Turn]:
    """Return every scripted turn, in the order of the script."""
    script = yaml.safe_load(SCRIPT.read_text(encoding="utf-8"))
    tools = {
        name: {"type": "function", "function": {"name": name, **function}}
        for name, function in script["tools"].items()
    }
    return [turn for one in script["conversations"] for turn in _turns(tools, **one)]


def turn(turn_id: str) -> Turn:
    """Return one scripted turn.

    Raises:
        KeyError: no turn has this id; the message lists those that exist.
    """
    turns = {one.id: one for one in conversations()}
    if turn_id not in turns:
        raise KeyError(f"no turn {turn_id}; there are {', '.join(turns)}")
    return turns[turn_id]


def _turns(
    declared: dict[str, Any],
    id: str,
    messages: list[dict[str, Any]],
    tools: Sequence[str] = (),
    enable_thinking: bool = True,
) -> Iterator[Turn]:
    """Yield a turn for each assistant message of a conversation of the script."""
    history: list[dict[str, Any]] = []
    unanswered: list[str] = []
    number = 0
    for message in messages:
        if message["role"] == "tool":
            message = message | {"tool_call_id": unanswered.pop(0)}
        if message["role"] != "assistant":
            history.append(message)
            continue
        number += 1
        answer = {key: value for key, value in message.items() if key != "role"}
        answer["tool_calls"] = [ToolCall(**call) for call in message.get("tool_calls", [])]
        one = Turn(
            id=id if number == 1 else f"{id}/{number}",
            messages=list(history),
            tools=[declared[name] for name in tools],
            enable_thinking=enable_thinking,
            **answer,
        )
        yield one
        history.append(one.message)
        unanswered = [call["id"] for call in one.message.get("tool_calls", [])]
