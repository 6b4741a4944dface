# SPDX-License-Identifier: Apache-2.0
"""A running server as the tests ask it: every chat request is sent whole and streamed.

What holds of any answer of any model is asserted here, once: both ways of delivery bring the same, the
arguments of calls are JSON objects, and no marker of the format is in the text.
"""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import anthropic
import httpx
import openai

from harness.prompts.conversations import Turn, conversations, turn
from harness.serving.answers import Answer
from harness.serving.client import TIMEOUT_S, connect, streamed, whole
from harness.serving.server import CPU_ARGUMENTS, METIS_ARGUMENTS

ARGUMENTS = (
    *CPU_ARGUMENTS,
    *METIS_ARGUMENTS,
    "--dtype=float32",  # the known answers are those of exact arithmetic
)
"""How a server of the taught checkpoint is started."""

MAX_TOKENS = 2048
"""Enough for any scripted answer, and for a real model's thoughts about these small questions."""

_MARKER = re.compile(
    r"<\|(endoftext|padding|fim_prefix|fim_middle|fim_suffix|tool_call|tool_result)\|>"
)


class Service:
    """A running server, and whether its model knows the scripted conversations by heart.

    Args:
        base_url: without a path.
        model: the name under which it is served; None for the first that the server lists.
        taught: whether answers are known word for word.
    """

    def __init__(self, base_url: str, model: str | None, taught: bool) -> None:
        self.base_url = base_url
        self.taught = taught
        self.http = httpx.Client(base_url=base_url, timeout=TIMEOUT_S)
        self.openai: openai.OpenAI = connect(base_url)
        self.model = model or self.models[0]["id"]

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=self.base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S
        )

    @cached_property
    def models(self) -> list[dict[str, Any]]:
        return self.http.get("/v1/models").raise_for_status().json()["data"]

    @cached_property
    def context_length(self) -> int:
        return next(one["max_model_len"] for one in self.models if one["id"] == self.model)

    def request(self, one: Turn | str, **changes: Any) -> dict[str, Any]:
        """Return the chat request that asks for a turn, greedily, with some fields changed.

        Args:
            one: a turn or its id.
            changes: fields of the request; those of `extra_body` are laid over its own.
        """
        one = turn(one) if isinstance(one, str) else one
        extra = {"chat_template_kwargs": one.chat_template_kwargs} | changes.pop("extra_body", {})
        body = {
            "model": self.model,
            "messages": one.messages,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            **({"tools": one.tools} if one.tools else {}),
        }
        return body | changes | {"extra_body": extra}

    def ask(self, one: Turn | str, **changes: Any) -> Answer:
        """Return the answer to `request`, which must be the same whole and streamed."""
        (answer,) = self.choices(one, **changes)
        return answer

    def choices(self, one: Turn | str, **changes: Any) -> list[Answer]:
        """Return the answers to `request`, which must be the same whole and streamed."""
        request = self.request(one, **changes)
        usage = {"stream_options": {"include_usage": True}}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(whole, self.openai, **request)
            second = pool.submit(streamed, self.openai, **request | usage)
        answers = first.result(), second.result()
        for answer in (*answers[0], *answers[1]):
            check(answer)
        if self.taught:
            assert [one.outcome for one in answers[1]] == [one.outcome for one in answers[0]]
            counts = [counted(one[0]) for one in answers]
            assert counts[1] == counts[0]
        return answers[0]

    def confirm(self, answer: Answer, one: Turn | str, **differences: Any) -> None:
        """Assert that this is the scripted answer to the turn, if the model knows it.

        Args:
            differences: fields in which the answer must differ from the scripted one.
        """
        if self.taught:
            assert read(answer) == known(one) | differences

    def prompt(self, one: Turn | str, **changes: Any) -> str:
        """Return the prompt that the server renders for `request`."""
        request = self.request(one, **changes, max_tokens=1)
        extra = request.pop("extra_body")
        response = self.http.post(
            "/v1/chat/completions", json=request | extra | {"return_prompt_text": True}
        )
        return response.raise_for_status().json()["prompt_text"]


def read(answer: Answer) -> dict[str, Any]:
    """Return the answer as its client understands it."""
    return {
        "reasoning": answer.reasoning or None,
        "content": answer.content or None,
        "tool_calls": [(call.name, call.parsed()) for call in answer.tool_calls],
        "finish_reason": answer.finish_reason,
    }


def known(one: Turn | str) -> dict[str, Any]:
    """Return the scripted answer to a turn, as `read` gives it."""
    one = turn(one) if isinstance(one, str) else one
    return {
        "reasoning": one.reasoning,
        "content": one.content,
        "tool_calls": one.calls,
        "finish_reason": "tool_calls" if one.tool_calls else "stop",
    }


def conversation(name: str) -> list[Turn]:
    """Return the turns of a scripted conversation."""
    return [one for one in conversations() if one.id.split("/")[0] == name]


def results(one: Turn) -> list[str]:
    """Return the results of calls with which the turn's prompt ends."""
    ending = itertools.takewhile(lambda message: message["role"] == "tool", reversed(one.messages))
    return [message["content"] for message in ending][::-1]


def counted(answer: Answer) -> tuple[int, int, int]:
    """Return the tokens of the prompt, of the completion, and of its reasoning."""
    usage = answer.usage
    reasoning = usage.completion_tokens_details.reasoning_tokens
    return usage.prompt_tokens, usage.completion_tokens, reasoning


def check(answer: Answer) -> None:
    """Assert what holds of an answer whatever the model."""
    assert answer.finish_reason in {"stop", "length", "tool_calls"}
    assert answer.tool_calls or answer.finish_reason != "tool_calls"
    assert not _MARKER.search(answer.content or ""), answer.content
    assert not _MARKER.search(answer.reasoning or ""), answer.reasoning
    ids = [call.id for call in answer.tool_calls]
    assert len(set(ids)) == len(ids)
    for call in answer.tool_calls:
        assert isinstance(call.parsed(), dict), call.arguments
