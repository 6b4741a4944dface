# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API, through its own client: blocks in order, stop reasons, loops played back."""

import json
from typing import Any

import jsonschema
import pytest

from harness.prompts.conversations import turn
from tests.serving.messages import ask, blocks, body, confirm, known, play
from tests.serving.service import Service

KINDS = [
    "sum",
    "sum-direct",
    "no-reasoning",
    "sines",
    "alarm",
    "straight-into-a-call",
    "two-cities",
]


@pytest.mark.parametrize("name", KINDS)
def test_the_blocks_are_those_of_the_turn(service: Service, name: str):
    message = ask(service, turn(name))
    confirm(service, message, turn(name))
    calls = any(block.type == "tool_use" for block in message.content)
    assert message.stop_reason == ("tool_use" if calls else "end_turn")


@pytest.mark.taught
@pytest.mark.parametrize("name", ["loop", "two-cities", "second-turn", "ball-direct"])
def test_a_conversation_is_played_back_with_its_blocks(service: Service, name: str):
    for one, message in play(service, name):
        confirm(service, message, one)


def test_a_system_prompt_is_part_of_the_prompt(service: Service):
    message = ask(service, turn("sum"), system="You are a helpful assistant.")
    confirm(service, message, turn("sum"))
    plain = ask(service, turn("sum"))
    assert message.usage.input_tokens > plain.usage.input_tokens


def test_tokens_are_counted_as_they_are_charged(service: Service):
    one = turn("sines")
    counted = service.anthropic.messages.count_tokens(
        model=service.model, messages=one.messages, tools=body(service, one)["tools"]
    )
    message = ask(service, one, max_tokens=1)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("name", ["lagos", "lagos-direct", "straight-into-a-call"])
def test_any_forces_a_call(service: Service, name: str):
    message = ask(service, turn(name), tool_choice={"type": "any"})
    assert message.content[-1].type == "tool_use"
    assert message.stop_reason == "tool_use"
    confirm(service, message, turn(name))


def test_any_without_tools_calls_nothing(service: Service):
    message = ask(service, turn("sum-direct"), tool_choice={"type": "any"})
    assert "tool_use" not in {block.type for block in message.content}
    assert message.stop_reason == "end_turn"
    confirm(service, message, turn("sum-direct"))


def test_a_named_tool_is_forced(service: Service):
    message = ask(service, turn("lagos"), tool_choice={"type": "tool", "name": "get_weather"})
    assert message.content[-1].name == "get_weather"
    confirm(service, message, turn("lagos"))


@pytest.mark.xfail(
    strict=True,
    reason="vLLM takes chat's finish_reason of a named call for the end of the turn: "
    "https://github.com/vllm-project/vllm/pull/47598",
)
def test_a_named_tool_has_the_stop_reason_of_a_call(service: Service):
    message = ask(service, turn("lagos"), tool_choice={"type": "tool", "name": "get_weather"})
    assert message.stop_reason == "tool_use"


def test_calls_that_are_not_wanted_are_dropped(service: Service):
    message = ask(service, turn("lagos"), tool_choice={"type": "none"})
    assert "tool_use" not in {block.type for block in message.content}
    assert message.stop_reason == "end_turn"
    if service.taught:
        assert blocks(message) == known(turn("lagos"))[:1]


@pytest.mark.taught
def test_without_parallel_calls_only_the_first_comes(service: Service):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(service, turn("two-cities"), tool_choice=choice)
    assert blocks(message) == known(turn("two-cities"))[:2]


@pytest.mark.parametrize("name", ["ball", "ball-direct"])
def test_a_schema_binds_the_text_after_the_thinking(service: Service, name: str):
    schema = {"type": "object", "properties": {"cents": {"type": "integer"}}}
    schema |= {"required": ["cents"], "additionalProperties": False}
    message = ask(
        service,
        turn(name),
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    jsonschema.validate(json.loads(message.content[-1].text), schema)
    confirm(service, message, turn(name))


@pytest.mark.taught
def test_a_stop_sequence_is_named(service: Service):
    message = ask(service, turn("sum"), stop_sequences=["= 42"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "= 42")
    assert blocks(message) == [("thinking", "17 plus 25 is 42."), ("text", "17 + 25 ")]


HALF_A_FILE = {"path": "notes.txt", "content": "first line\nsecond line"}


@pytest.mark.taught
@pytest.mark.parametrize(
    ("name", "length", "written"),
    [
        ("sum", 5, [("thinking", "17 pl")]),
        ("sum", 25, [("thinking", "17 plus 25 is 42."), ("text", "17 + 25")]),
        ("lagos", 11, [("thinking", "They ask about Lagos.")]),
        ("notes-direct", 35, [("tool_use", ("write_file", HALF_A_FILE))]),
    ],
    ids=["thinking", "text", "tag", "call"],
)
def test_a_message_that_is_cut_says_so(
    service: Service, name: str, length: int, written: list[Any]
):
    message = ask(service, turn(name), max_tokens=length)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == length
    assert blocks(message) == written
