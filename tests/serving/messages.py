# SPDX-License-Identifier: Apache-2.0
"""The Messages API as the tests ask it: whole and streamed, through Anthropic's client."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness.prompts.conversations import Turn
from tests.serving.service import MAX_TOKENS, Service, conversation, results

Block = tuple[str, Any]
"""The type of a content block, and its text or the call that it makes."""


def converted(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of chat completions as this API takes them."""
    functions = [tool["function"] for tool in tools]
    return [
        {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
        }
        for function in functions
    ]


def body(service: Service, one: Turn, **changes: Any) -> dict[str, Any]:
    """Return the request for a turn that has no history."""
    request = {
        "model": service.model,
        "messages": one.messages,
        "max_tokens": MAX_TOKENS,
        **({"tools": converted(one.tools)} if one.tools else {}),
        **({} if one.enable_thinking else {"thinking": {"type": "disabled"}}),
    }
    # The client knows no temperature.
    return request | changes | {"extra_body": {"temperature": 0} | changes.get("extra_body", {})}


def ask(service: Service, one: Turn, **changes: Any) -> Any:
    """Return the message for `body`, which must be the same whole and streamed."""
    request = body(service, one, **changes)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(service.anthropic.messages.create, **request)
        second = pool.submit(_streamed, service, request)
    message, streamed = first.result(), second.result()
    for either in (message, streamed):
        assert all(text.strip() for kind, text in blocks(either) if kind != "tool_use")
    if service.taught:
        assert blocks(streamed) == blocks(message)
        for field in ("stop_reason", "stop_sequence"):
            assert getattr(streamed, field) == getattr(message, field)
        assert streamed.usage.output_tokens == message.usage.output_tokens
    return message


def _streamed(service: Service, request: dict[str, Any]) -> Any:
    """Return the message that Anthropic's client puts together of a stream.

    The client adds events of its own between those of the server.
    """
    with service.anthropic.messages.stream(**request) as events:
        kept = [event for event in events if event.type.startswith(("message_", "content_block_"))]
        message = events.get_final_message()
    assert [event.type for event in kept[-2:]] == ["message_delta", "message_stop"]
    assert kept[0].type == "message_start"
    by_block = itertools.groupby(kept[1:-2], key=lambda event: event.index)
    for (index, group), block in zip(by_block, message.content, strict=True):
        assert block is message.content[index]
        start, *deltas, stop = group
        assert (start.type, stop.type) == ("content_block_start", "content_block_stop")
        assert start.content_block.type == block.type
        assert {event.type for event in deltas} <= {"content_block_delta"}
        if block.type == "tool_use":
            parts = "".join(event.delta.partial_json for event in deltas)
            assert json.loads(parts or "{}") == block.input
    return message


def blocks(message: Any) -> list[Block]:
    """Return what a message's blocks say."""
    return [
        (block.type, (block.name, block.input))
        if block.type == "tool_use"
        else (block.type, getattr(block, block.type))
        for block in message.content
    ]


def known(one: Turn) -> list[Block]:
    """Return the scripted answer to a turn, as `blocks` gives it."""
    texts = [("thinking", one.reasoning), ("text", one.content)]
    calls = [("tool_use", call) for call in one.calls]
    return [(kind, text) for kind, text in texts if text] + calls


def confirm(service: Service, message: Any, one: Turn) -> None:
    """Assert that this is the scripted answer to the turn, if the model knows it."""
    if service.taught:
        assert blocks(message) == known(one)


def play(service: Service, name: str) -> Iterator[tuple[Turn, Any]]:
    """Ask for each turn of a conversation with the blocks of the messages before it."""
    played: list[dict[str, Any]] = []
    call_ids: list[str] = []
    for one in conversation(name):
        said: Any = [
            {"type": "tool_result", "tool_use_id": call_id, "content": result}
            for call_id, result in zip(call_ids, results(one), strict=True)
        ]
        played.append({"role": "user", "content": said or one.messages[-1]["content"]})
        message = ask(service, one, messages=played)
        yield one, message
        content = [block.model_dump(exclude_none=True) for block in message.content]
        played.append({"role": "assistant", "content": content})
        call_ids = [block.id for block in message.content if block.type == "tool_use"]
