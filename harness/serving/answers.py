# SPDX-License-Identifier: Apache-2.0
"""A chat completion as a client reads it: whole, or put together of the pieces of a stream.

A stream is held to the protocol that clients rely on. vLLM's addition (`reasoning`) is read where it
is. Objects of OpenAI's client and of vLLM's own protocol are read alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class ProtocolError(RuntimeError):
    """A stream broke the protocol; the message says how."""


@dataclass
class ReceivedCall:
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
        content_pieces: the content as it came.
        finish_reason: None until the choice ended.
        stop_reason: vLLM's: the stop string or token that ended it, None for the model's own.
        logprobs: a piece for each token, where they were asked for.
        usage: of the whole request, None where it was not sent.
    """

    reasoning: str | None = None
    content: str | None = None
    content_pieces: list[str] = field(default_factory=list)
    tool_calls: list[ReceivedCall] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Any] = field(default_factory=list)
    usage: Any = None

    @property
    def said(self) -> dict[str, Any]:
        """What the turn says, and that it ended; empty fields count as absent."""
        return {
            "reasoning": self.reasoning or None,
            "content": self.content or None,
            "tool_calls": [(call.name, call.arguments) for call in self.tool_calls],
            "finish_reason": self.finish_reason,
        }

    @property
    def outcome(self) -> dict[str, Any]:
        """What must not depend on how the answer was delivered."""
        tokens = [piece.token for piece in self.logprobs]
        return self.said | {"stop_reason": self.stop_reason, "tokens": tokens}

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
        content_pieces=[message.content] if message.content else [],
        tool_calls=[
            ReceivedCall(call.function.name, call.id, [call.function.arguments])
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
        answer.content_pieces.append(delta.content)
    for piece in delta.tool_calls or []:
        _add_call(answer.tool_calls, piece)
    if choice.logprobs:
        answer.logprobs += choice.logprobs.content
    answer.finish_reason = choice.finish_reason
    answer.stop_reason = getattr(choice, "stop_reason", None)


def _add_call(calls: list[ReceivedCall], piece: Any) -> None:
    name = piece.function.name if piece.function else None
    if piece.index == len(calls):
        if not (piece.id and name and piece.type == "function"):
            raise ProtocolError(f"the first piece of a call lacks its id, type or name: {piece}")
        calls.append(ReceivedCall(name, piece.id))
    elif piece.index != len(calls) - 1 or piece.id or name:
        raise ProtocolError(f"a later piece of a call has another index, an id or a name: {piece}")
    if piece.function and piece.function.arguments:
        calls[-1].fragments.append(piece.function.arguments)
