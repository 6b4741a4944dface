# SPDX-License-Identifier: Apache-2.0
"""Chat requests to an OpenAI server, whole and streamed, read into one shape that compares.

vLLM's additions to the protocol (`reasoning`, cached tokens) are read where they are.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import openai


@dataclass
class ToolCall:
    """A function call: its arguments are the text that was sent, which should be JSON."""

    name: str = ""
    arguments: str = ""
    id: str = ""

    def parsed(self) -> Any:
        """Return the arguments as the client would read them.

        Raises:
            json.JSONDecodeError: They are not JSON.
        """
        return json.loads(self.arguments)


@dataclass
class Answer:
    """What a client got for one choice.

    Attributes:
        reasoning, content: None where the field was absent, null or never sent.
        finish_reason: None until the choice ended.
        usage: Of the whole request, None where it was not sent.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Any = None

    def same_as(self, other: "Answer") -> bool:
        """Whether both say the same, whatever the identifiers and the fields left empty."""

        def key(answer: Answer) -> tuple[Any, ...]:
            calls = [(call.name, call.arguments) for call in answer.tool_calls]
            return answer.reasoning or "", answer.content or "", calls, answer.finish_reason

        return key(self) == key(other)


def connect(base_url: str) -> openai.OpenAI:
    """Return a client that neither retries nor waits long: a fault must show."""
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)


def whole(client: openai.OpenAI, **request: Any) -> list[Answer]:
    """Ask for a chat completion and return its choices, by index."""
    completion = client.chat.completions.create(stream=False, **request)
    answers = []
    for choice in sorted(completion.choices, key=lambda choice: choice.index):
        message = choice.message
        calls = [
            ToolCall(call.function.name, call.function.arguments, call.id)
            for call in message.tool_calls or []
        ]
        answers.append(
            Answer(
                getattr(message, "reasoning", None),
                message.content,
                calls,
                choice.finish_reason,
                completion.usage,
            )
        )
    return answers


def streamed(client: openai.OpenAI, **request: Any) -> list[Answer]:
    """Ask for a streamed chat completion and return its choices put together, by index."""
    answers: dict[int, Answer] = {}
    usage = None
    for chunk in client.chat.completions.create(stream=True, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, Answer())
            _add(answer, choice)
    for answer in answers.values():
        answer.usage = usage
    return [answers[index] for index in sorted(answers)]


def _add(answer: Answer, choice: Any) -> None:
    """Put one streamed piece of a choice where it belongs."""
    delta = choice.delta
    reasoning = getattr(delta, "reasoning", None)
    if reasoning:
        answer.reasoning = (answer.reasoning or "") + reasoning
    if delta.content:
        answer.content = (answer.content or "") + delta.content
    for piece in delta.tool_calls or []:
        while len(answer.tool_calls) <= piece.index:
            answer.tool_calls.append(ToolCall())
        call = answer.tool_calls[piece.index]
        call.id = piece.id or call.id
        if piece.function is not None:
            call.name += piece.function.name or ""
            call.arguments += piece.function.arguments or ""
    if choice.finish_reason is not None:
        if answer.finish_reason is not None:
            raise AssertionError("finish_reason was sent twice for one choice")
        answer.finish_reason = choice.finish_reason
