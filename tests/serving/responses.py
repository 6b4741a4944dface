# SPDX-License-Identifier: Apache-2.0
"""The Responses API as the tests ask it: whole and streamed, with the events held to the response."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness.prompts.conversations import Turn
from tests.serving.service import MAX_TOKENS, Service, conversation, results

Item = tuple[str, Any]
"""The type of an output item, and its text or the call that it makes."""

_TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


def body(service: Service, one: Turn, **changes: Any) -> dict[str, Any]:
    """Return the request for a turn that has no history."""
    request = {
        "model": service.model,
        "input": one.messages,
        "temperature": 0,
        "max_output_tokens": MAX_TOKENS,
        "tools": [{"type": "function", **tool["function"]} for tool in one.tools],
        "extra_body": {"chat_template_kwargs": one.chat_template_kwargs},
    }
    return request | changes


def ask(service: Service, one: Turn, **changes: Any) -> Any:
    """Return the response to `body`, which must be the same whole and streamed."""
    request = body(service, one, **changes)
    create = service.openai.responses.create
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(create, **request)
        second = pool.submit(lambda: list(create(stream=True, **request)))
    response, streamed = first.result(), _end(second.result())
    for either in (response, streamed):
        assert all(text.strip() for kind, text in items(either) if kind != "function_call")
    if service.taught:
        assert items(streamed) == items(response)
        assert streamed.status == response.status
        assert streamed.usage.output_tokens == response.usage.output_tokens
        details = streamed.usage.output_tokens_details, response.usage.output_tokens_details
        assert details[0].reasoning_tokens == details[1].reasoning_tokens
    return response


def _end(events: list[Any]) -> Any:
    """Return the response at the end of a stream, which its other events must have told before."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1].response
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    expected = [(index, item.type) for index, item in enumerate(response.output)]
    for told in (added, done):
        assert [(event.output_index, event.item.type) for event in told] == expected
    for index, item in enumerate(response.output):
        prefix = _TEXT_EVENTS[item.type]
        own = [event for event in events if getattr(event, "output_index", None) == index]
        joined = "".join(event.delta for event in own if event.type == f"{prefix}.delta")
        (end,) = [event for event in own if event.type == f"{prefix}.done"]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert joined == text
        assert (end.arguments if item.type == "function_call" else end.text) == text
        if item.type == "function_call":
            assert added[index].item.name == done[index].item.name == item.name
            assert added[index].item.call_id == done[index].item.call_id
    return response


def items(response: Any) -> list[Item]:
    """Return what a response's items say."""
    return [
        (item.type, (item.name, json.loads(item.arguments)))
        if item.type == "function_call"
        else (item.type, "".join(part.text for part in item.content))
        for item in response.output
    ]


def known(one: Turn) -> list[Item]:
    """Return the scripted answer to a turn, as `items` gives it."""
    texts = [("reasoning", one.reasoning), ("message", one.content)]
    calls = [("function_call", call) for call in one.calls]
    return [(kind, text) for kind, text in texts if text] + calls


def confirm(service: Service, response: Any, one: Turn) -> None:
    """Assert that this is the scripted answer to the turn, if the model knows it."""
    if service.taught:
        assert items(response) == known(one)


def play(service: Service, name: str) -> Iterator[tuple[Turn, Any]]:
    """Ask for each turn of a conversation with the items of the responses before it."""
    played: list[Any] = []
    call_ids: list[str] = []
    for one in conversation(name):
        if one.messages[-1]["role"] == "user":
            played.append(one.messages[-1])
        played += [
            {"type": "function_call_output", "call_id": call_id, "output": result}
            for call_id, result in zip(call_ids, results(one), strict=True)
        ]
        response = ask(service, one, input=played)
        yield one, response
        played += [item.model_dump(exclude_none=True) for item in response.output]
        call_ids = [item.call_id for item in response.output if item.type == "function_call"]
