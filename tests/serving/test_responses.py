# SPDX-License-Identifier: Apache-2.0
"""The Responses API: items in order, events that join to them, and conversations played back."""

import json
from typing import Any

import jsonschema
import pytest

from harness.prompts.conversations import turn
from tests.serving.responses import ask, body, confirm, items, known, play
from tests.serving.service import Service

KINDS = [
    "sum",
    "sum-direct",
    "no-reasoning",
    "lagos",
    "alarm",
    "straight-into-a-call",
    "two-cities",
]


@pytest.mark.parametrize("name", KINDS)
def test_the_items_are_those_of_the_turn(service: Service, name: str):
    response = ask(service, turn(name))
    assert response.status == "completed"
    assert (response.usage.output_tokens_details.reasoning_tokens > 0) is turn(name).enable_thinking
    confirm(service, response, turn(name))


@pytest.mark.taught
@pytest.mark.parametrize("name", ["loop", "two-cities", "second-turn", "ball-direct"])
def test_a_conversation_is_played_back_with_its_items(service: Service, name: str):
    for one, response in play(service, name):
        confirm(service, response, one)


def test_direct_mode_is_asked_for_by_effort(service: Service):
    response = ask(service, turn("sum"), reasoning={"effort": "none"})
    confirm(service, response, turn("sum-direct"))
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_instructions_are_a_system_message(service: Service):
    response = ask(service, turn("sum"), instructions="You are a helpful assistant.")
    confirm(service, response, turn("sum"))
    plain = ask(service, turn("sum"))
    assert response.usage.input_tokens > plain.usage.input_tokens


NAMED = {"type": "function", "name": "get_weather"}


@pytest.mark.parametrize("name", ["lagos", "lagos-direct", "straight-into-a-call"])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_call_is_chosen_or_forced(service: Service, name: str, choice: Any):
    response = ask(service, turn(name), tool_choice=choice)
    assert choice == "auto" or [item.type for item in response.output][-1] == "function_call"
    confirm(service, response, turn(name))


def test_calls_that_are_not_wanted_are_dropped(service: Service):
    response = ask(service, turn("lagos"), tool_choice="none")
    assert "function_call" not in {item.type for item in response.output}
    if service.taught:
        assert items(response) == known(turn("lagos"))[:1]


@pytest.mark.parametrize("name", ["ball", "ball-direct"])
def test_a_schema_binds_the_text_after_the_reasoning(service: Service, name: str):
    schema = {"type": "object", "properties": {"cents": {"type": "integer"}}}
    schema |= {"required": ["cents"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "price", "schema": schema, "strict": True}
    response = ask(service, turn(name), text={"format": form})
    jsonschema.validate(json.loads(response.output_text), schema)
    confirm(service, response, turn(name))


# Truncation


HALF_A_FILE = {"path": "notes.txt", "content": "first line\nsecond line"}


@pytest.mark.taught
@pytest.mark.parametrize(
    ("name", "length", "written"),
    [
        ("sum", 5, [("reasoning", "17 pl")]),
        ("sum", 25, [("reasoning", "17 plus 25 is 42."), ("message", "17 + 25")]),
        ("lagos", 11, [("reasoning", "They ask about Lagos.")]),
        ("notes-direct", 35, [("function_call", ("write_file", HALF_A_FILE))]),
    ],
    ids=["reasoning", "message", "tag", "call"],
)
def test_a_response_that_is_cut_says_so(
    service: Service, name: str, length: int, written: list[Any]
):
    response = ask(service, turn(name), max_output_tokens=length)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == length
    assert items(response) == written


@pytest.mark.xfail(
    strict=True,
    reason="vLLM says completed of every item: https://github.com/vllm-project/vllm/issues/57998",
)
@pytest.mark.parametrize("name", ["sum-direct", "notes-direct"])
def test_an_item_that_is_cut_says_so(service: Service, name: str):
    response = ask(service, turn(name), max_output_tokens=3 if name == "sum-direct" else 30)
    assert response.output[-1].status == "incomplete"


@pytest.mark.xfail(
    strict=True,
    reason="vLLM ends every stream with response.completed, which may hold an incomplete response: "
    "https://github.com/vllm-project/vllm/pull/45386",
)
def test_a_stream_that_is_cut_ends_with_incomplete(service: Service):
    request = body(service, turn("sum"), max_output_tokens=5)
    *_, last = service.openai.responses.create(stream=True, **request)
    assert last.type == "response.incomplete"


@pytest.mark.xfail(
    strict=True,
    reason="vLLM draws another call_id for the response at the end of the stream: "
    "https://github.com/vllm-project/vllm/pull/47916",
)
def test_a_streamed_call_has_one_id(service: Service):
    request = body(service, turn("lagos"), tool_choice="required")
    events = list(service.openai.responses.create(stream=True, **request))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done[-1].call_id == events[-1].response.output[-1].call_id
