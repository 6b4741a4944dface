# SPDX-License-Identifier: Apache-2.0
"""Chat requests to an OpenAI server, whole and streamed, read into one shape that compares.

A stream is put together as clients do it, and held to the protocol that they rely on. vLLM's addition
(`reasoning`) is read where it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import openai

TIMEOUT_S = 120.0
"""Longest wait for a piece of a response. On two cores a tiny model answers in 3 s."""


class ProtocolError(RuntimeError):
    """A stream broke the protocol; the message says how."""


@dataclass
class ToolCall:
    """A function call; its arguments are the text that was sent, in the pieces in which it came."""

    name: str = ""
    id: str = ""
    fragments: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.fragments)

    def parsed(self) -> Any:
        """Return the arguments as the client would read them.

        Raises:
            json.JSONDecodeError: they are not JSON.
        """
        return json.loads(self.arguments)


@dataclass
class Answer:
    """What a client got for one choice.

    Attributes:
        reasoning, content: None where the field was absent, null or never sent.
        finish_reason: None until the choice ended.
        stop_reason: vLLM's: the stop string or token that ended it, None for the model's own.
        logprobs: a piece for each token, where they were asked for.
        usage: of the whole request, None where it was not sent.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Any] = field(default_factory=list)
    usage: Any = None

    @property
    def outcome(self) -> dict[str, Any]:
        """What must not depend on how the answer was delivered; empty fields count as absent."""
        return {
            "reasoning": self.reasoning or None,
            "content": self.content or None,
            "tool_calls": [(call.name, call.arguments) for call in self.tool_calls],
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "tokens": [piece.token for piece in self.logprobs],
        }

    @property
    def message(self) -> dict[str, Any]:
        """The message that a client sends back."""
        message = {"role": "assistant", "content": self.content, "reasoning": self.reasoning}
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.tool_calls
        ]
        return message | ({"tool_calls": calls} if calls else {})


def connect(base_url: str) -> openai.OpenAI:
    """Return a client that neither retries nor waits long: a fault must show.

    Args:
        base_url: the server's, without a path.
    """
    return openai.OpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    )


def connect_async(base_url: str) -> openai.AsyncOpenAI:
    """Return a client like that of `connect`, for up to a thousand requests at once."""
    return openai.AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def whole(client: openai.OpenAI, **request: Any) -> list[Answer]:
    """Ask for a chat completion and return its choices, by index."""
    return answers(client.chat.completions.create(stream=False, **request))


def streamed(client: openai.OpenAI, **request: Any) -> list[Answer]:
    """Ask for a streamed chat completion and return its choices put together, by index.

    Raises:
        ProtocolError: no client could have put them together.
    """
    assembly = Assembly()
    for chunk in client.chat.completions.create(stream=True, **request):
        assembly.add(chunk)
    return assembly.answers()


def answers(completion: Any) -> list[Answer]:
    """Return the choices of a chat completion, by index."""
    return [
        _answer(choice, completion.usage)
        for choice in sorted(completion.choices, key=lambda choice: choice.index)
    ]


class Assembly:
    """Puts a streamed chat completion together, piece by piece."""

    def __init__(self) -> None:
        self._answers: dict[int, Answer] = {}
        self._usage: Any = None

    def add(self, chunk: Any) -> None:
        """Take the next piece.

        Raises:
            ProtocolError: no client could put it where it belongs.
        """
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            _add(self._answers.setdefault(choice.index, Answer()), choice)

    def answers(self) -> list[Answer]:
        """Return the choices, by index, once the stream has ended.

        Raises:
            ProtocolError: one of them had no end.
        """
        for index, answer in self._answers.items():
            if answer.finish_reason is None:
                raise ProtocolError(f"choice {index} ended without a finish_reason")
            answer.usage = self._usage
        return [self._answers[index] for index in sorted(self._answers)]


def _answer(choice: Any, usage: Any) -> Answer:
    message = choice.message
    return Answer(
        reasoning=getattr(message, "reasoning", None),
        content=message.content,
        tool_calls=[
            ToolCall(call.function.name, call.id, [call.function.arguments])
            for call in message.tool_calls or []
        ],
        finish_reason=choice.finish_reason,
        stop_reason=getattr(choice, "stop_reason", None),
        logprobs=list(choice.logprobs.content) if choice.logprobs else [],
        usage=usage,
    )


def _add(answer: Answer, choice: Any) -> None:
    """Put one streamed piece of a choice where it belongs."""
    if answer.finish_reason is not None:
        raise ProtocolError(f"a piece came after the one with finish_reason: {choice}")
    delta = choice.delta
    if reasoning := getattr(delta, "reasoning", None):
        answer.reasoning = (answer.reasoning or "") + reasoning
    if delta.content:
        answer.content = (answer.content or "") + delta.content
    for piece in delta.tool_calls or []:
        _add_call(answer.tool_calls, piece)
    if choice.logprobs:
        answer.logprobs += choice.logprobs.content
    answer.finish_reason = choice.finish_reason
    answer.stop_reason = getattr(choice, "stop_reason", None)


def _add_call(calls: list[ToolCall], piece: Any) -> None:
    name = piece.function.name if piece.function else None
    if piece.index == len(calls):
        if not (piece.id and name and piece.type == "function"):
            raise ProtocolError(f"the first piece of a call lacks its id, type or name: {piece}")
        calls.append(ToolCall(name, piece.id))
    elif piece.index != len(calls) - 1 or piece.id or name:
        raise ProtocolError(f"a later piece of a call has another index, an id or a name: {piece}")
    if piece.function and piece.function.arguments:
        calls[-1].fragments.append(piece.function.arguments)
