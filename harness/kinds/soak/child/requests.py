# SPDX-License-Identifier: Apache-2.0
"""What clients of a soak ask: good requests, whose answer must not depend on company, and bad ones.

All are greedy, and nothing in them is drawn while traffic runs, so that a request can be asked alone
before and after. Bad ones are among those that tests/serving/test_bad_requests.py knows, with the
status that the OpenAI API reference gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from harness.kinds.soak.settings import Clients
from harness.prompts.conversations import Turn, conversations, turn
from harness.prompts.corpus import random_tokens

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_PREFIX_WORDS = 400  # some 1,200 tokens of the tiny checkpoint: more than three blocks of its cache
_LONG_PROMPTS = 16
_LONG_PROMPT_TOKENS = (20, 700)


@dataclass(frozen=True)
class GoodRequest:
    """A request that is answered.

    Attributes:
        chat: a chat completion; else a completion of token ids.
        body: the fields of the request, those that only vLLM knows in `extra_body`.
    """

    name: str
    chat: bool
    body: dict[str, Any]


@dataclass(frozen=True)
class BadRequest:
    """A request that is refused with a status of its own; the body is JSON, or text that is none."""

    name: str
    path: str
    body: dict[str, Any] | str
    status: int


def good_requests(model: str, vocab_size: int, soak: Clients) -> dict[str, list[GoodRequest]]:
    """Return the good requests by kind.

    Args:
        soak: the cell's settings of that name: `max_tokens` bounds every answer, `distinct` how many
            of a kind there are, and `seed` draws them.
    """
    draw = Random(soak.seed)
    limit = {"model": model, "temperature": 0.0, "max_tokens": soak.max_tokens}
    turns = {one.id: one for one in conversations()}
    made = {
        "chat": [_chat(limit, one) for one in turns.values() if not one.tools],
        "tools": [_chat(limit, one) for one in turns.values() if one.tools],
        "structured": list(_structured(limit, turns)),
        "prefix": list(_prefixed(limit, turns)),
        "long": list(_long(limit, draw, vocab_size)),
    }
    return {
        kind: draw.sample(found, min(len(found), soak.distinct)) for kind, found in made.items()
    }


def bad_requests(model: str, context_length: int) -> list[BadRequest]:
    """Return requests that no server may answer."""
    question = {"messages": turn("sum-direct").messages, "max_tokens": 8}
    objekt = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}}
    too_long = [{"role": "user", "content": "word " * context_length}]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    changes: dict[str, tuple[dict[str, Any], int]] = {
        "prompt over the context": ({"messages": too_long}, 400),
        "answer over the context": ({"max_tokens": 10**9}, 400),
        "no tokens": ({"max_tokens": 0}, 400),
        "temperature": ({"temperature": -1}, 400),
        "no messages": ({"messages": []}, 400),
        "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, 400),
        "picture": ({"messages": [{"role": "user", "content": [picture]}]}, 400),
        "unknown model": ({"model": "no-such-model"}, 404),
        "required without tools": ({"tool_choice": "required"}, 400),
        "broken regex": ({"structured_outputs": {"regex": "(["}}, 400),
        "schema with an unknown type": ({"response_format": objekt}, 400),
        "token that does not exist": ({"logit_bias": {"99999999": 1}}, 400),
    }
    found = [
        BadRequest(name, CHAT, {"model": model} | question | fields, status)
        for name, (fields, status) in changes.items()
    ]
    ids = {"model": model, "prompt": [10**8], "max_tokens": 8}
    return [
        *found,
        BadRequest("prompt of an unknown token", COMPLETIONS, ids, 400),
        BadRequest("no JSON", CHAT, '{"model": ', 400),
    ]


def _chat(limit: dict[str, Any], one: Turn, **changes: Any) -> GoodRequest:
    """Return the request for a scripted turn, with other fields or another constraint."""
    name = "-".join([one.id, *changes.pop("named", ())])
    extra = {"chat_template_kwargs": one.chat_template_kwargs} | changes.pop("extra_body", {})
    tools = {"tools": one.tools} if one.tools else {}
    body = limit | {"messages": one.messages} | tools | changes
    return GoodRequest(name, True, body | {"extra_body": extra})


def _structured(limit: dict[str, Any], turns: Mapping[str, Turn]) -> Iterator[GoodRequest]:
    """Yield requests whose content, or call, a grammar binds."""
    cents = {"type": "object", "properties": {"cents": {"type": "integer"}}, "required": ["cents"]}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": cents}}
    for name in ("ball", "ball-direct", "ball/2"):
        yield _chat(limit, turns[name], response_format=schema, named=["schema"])
    yield _chat(limit, turns["profile"], response_format={"type": "json_object"}, named=["json"])
    for kind, value in (
        ("choice", ["PERHAPS", "NEVER"]),
        ("regex", "#[0-9]{3}"),
        ("grammar", 'root ::= "yes" | "no"'),
    ):
        constraint = {"structured_outputs": {kind: value}}
        yield _chat(limit, turns["yes-or-no"], extra_body=constraint, named=[kind])
    yield _chat(limit, turns["lagos"], tool_choice="required", named=["required"])
    named = {"type": "function", "function": {"name": "get_weather"}}
    yield _chat(limit, turns["lagos"], tool_choice=named, named=["forced"])


def _prefixed(limit: dict[str, Any], turns: Mapping[str, Turn]) -> Iterator[GoodRequest]:
    """Yield requests that share a prefix over several blocks of the cache, and end differently."""
    words = " ".join(f"rule {number}: stay calm." for number in range(_PREFIX_WORDS // 4))
    system = {"role": "system", "content": words}
    for one in turns.values():
        if not one.tools and len(one.messages) == 1:
            messages = [system, *one.messages]
            yield _chat(limit, one, messages=messages, named=["prefixed"])


def _long(limit: dict[str, Any], draw: Random, vocab_size: int) -> Iterator[GoodRequest]:
    """Yield prompts of any length, answered to the last token: sequences that grow."""
    for number in range(_LONG_PROMPTS):
        length = draw.randint(*_LONG_PROMPT_TOKENS)
        ids = random_tokens(draw, length, vocab_size)
        extra = {"extra_body": {"ignore_eos": True}}
        yield GoodRequest(f"long{number}-{length}", False, limit | {"prompt": ids} | extra)
