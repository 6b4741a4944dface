# SPDX-License-Identifier: Apache-2.0
"""Chat completions with tools: who decides whether and what is called, and loops over results."""

from typing import Any

import jsonschema
import pytest

from harness.prompts.conversations import turn
from harness.serving.answers import Answer
from harness.serving.client import streamed, whole
from tests.serving.service import Service, conversation, known, read, results

GET_WEATHER = {"type": "function", "function": {"name": "get_weather"}}
LAGOS = ["lagos", "lagos-direct"]
STRICT = ["alarm", "notes-direct", "redirect", "straight-into-a-call", "two-cities"]


@pytest.mark.parametrize("name", LAGOS)
def test_the_model_may_choose(service: Service, name: str):
    answer = service.ask(name, tool_choice="auto")
    service.confirm(answer, name)
    assert (answer.finish_reason == "tool_calls") is bool(answer.tool_calls)


@pytest.mark.parametrize("name", [*LAGOS, "straight-into-a-call"])
def test_calls_that_are_not_wanted_are_dropped(service: Service, name: str):
    answer = service.ask(name, tool_choice="none")
    assert answer.tool_calls == []
    service.confirm(answer, name, tool_calls=[], finish_reason="stop")


@pytest.mark.parametrize("name", [*LAGOS, "straight-into-a-call", "two-cities"])
def test_a_required_call_comes_in_the_models_own_format(service: Service, name: str):
    answer = service.ask(name, tool_choice="required")
    assert answer.tool_calls
    assert answer.finish_reason == "tool_calls"
    _validate(answer, turn(name).tools)
    service.confirm(answer, name)


@pytest.mark.parametrize("name", [*LAGOS, "straight-into-a-call", "two-cities"])
def test_a_named_call_is_the_only_one(service: Service, name: str):
    answer = service.ask(name, tool_choice=GET_WEATHER)
    assert [call.name for call in answer.tool_calls] == ["get_weather"]
    assert answer.finish_reason == "stop"  # OpenAI's, for a named call
    _validate(answer, turn(name).tools)
    first = known(name)["tool_calls"][:1]
    service.confirm(answer, name, tool_calls=first, finish_reason="stop")


SIGNAL = {
    "type": "function",
    "function": {
        "name": "signal",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
            "required": ["on", "colour"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"required": "required", "named": {"type": "function", "function": {"name": "signal"}}}


@pytest.mark.parametrize("name", ["sum", "sum-direct"])
@pytest.mark.parametrize("choice", FORCED)
def test_a_forced_call_comes_where_the_model_would_not_call(
    service: Service, name: str, choice: Any
):
    answer = service.ask(name, tools=[SIGNAL], tool_choice=FORCED[choice], max_tokens=200)
    assert {call.name for call in answer.tool_calls} == {"signal"}
    assert choice == "required" or len(answer.tool_calls) == 1
    assert not answer.content
    _validate(answer, [SIGNAL])
    if service.taught:
        assert answer.reasoning == turn(name).reasoning


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["red", "green"]},
        {"const": "red"},
        {"type": "string", "pattern": "^#[0-9]{3}$"},
        {"type": "string", "format": "date"},
        {"type": "string", "minLength": 3, "maxLength": 3},
        {"anyOf": [{"enum": ["red"]}, {"type": "null"}]},
        {"enum": [1, 2]},
        {"type": "boolean"},
    ],
    ids=lambda schema: "-".join(schema),
)
def test_a_forced_value_is_as_its_schema_says(service: Service, schema: dict[str, Any]):
    """White space that a grammar allowed around a text would be part of it."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": _one(schema)}}]
    choice = {"type": "function", "function": {"name": "f"}}
    answer = service.ask("sum-direct", tools=tools, tool_choice=choice, max_tokens=200)
    assert [call.name for call in answer.tool_calls] == ["f"]
    _validate(answer, tools)


@pytest.mark.parametrize("name", ["lagos", "sum", "sum-direct"])
def test_a_required_answer_has_no_content_beside_its_calls(service: Service, name: str):
    tools = turn(name).tools or [SIGNAL]
    request = service.request(name, tools=tools, tool_choice="required", max_tokens=200)
    (answer,) = whole(service.openai, **request)
    assert answer.tool_calls
    assert answer.content is None


@pytest.mark.parametrize("name", ["sum", "sum-direct"])
def test_a_named_call_with_a_free_text_is_the_only_one(service: Service, name: str):
    tools = turn("lagos").tools
    answer = service.ask(name, tools=tools, tool_choice=GET_WEATHER, max_tokens=200)
    assert [call.name for call in answer.tool_calls] == ["get_weather"]
    assert not answer.content


@pytest.mark.parametrize("name", STRICT)
def test_a_strict_tool_is_called_as_its_schema_says(service: Service, name: str):
    tools = [
        {**tool, "function": {**tool["function"], "strict": True}} for tool in turn(name).tools
    ]
    answer = service.ask(name, tools=tools)
    _validate(answer, tools)
    service.confirm(answer, name)


@pytest.mark.taught
def test_a_strict_schema_binds_what_the_model_would_write(service: Service):
    """It would go on with the days."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    schema["additionalProperties"] = False
    function = {"name": "get_weather", "description": "get weather", "parameters": schema}
    tools = [{"type": "function", "function": {**function, "strict": True}}]
    answer = service.ask("lagos", tools=tools)
    service.confirm(answer, "lagos", tool_calls=[("get_weather", {"city": "Lagos"})])


@pytest.mark.taught
def test_without_parallel_calls_only_the_first_comes(service: Service):
    answer = service.ask("two-cities", parallel_tool_calls=False)
    first = known("two-cities")["tool_calls"][:1]
    service.confirm(answer, "two-cities", tool_calls=first)


@pytest.mark.taught
def test_an_undeclared_tool_is_called_with_texts(service: Service):
    (write_file,) = turn("notes-direct").tools
    answer = service.ask("lagos", tools=[write_file])
    texts = ("get_weather", {"city": "Lagos", "days": "2"})
    service.confirm(answer, "lagos", tool_calls=[texts])


@pytest.mark.taught
def test_a_long_argument_is_streamed_as_it_is_written(service: Service):
    (answer,) = streamed(service.openai, **service.request("notes-direct"))
    service.confirm(answer, "notes-direct")
    # Its head, its end, and pieces between: a busy server sends several tokens at once.
    assert len(answer.tool_calls[0].fragments) > 3


@pytest.mark.taught
@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("name", ["loop", "two-cities"])
def test_a_loop_sends_back_reasoning_calls_and_results(service: Service, name: str, ask: Any):
    messages: list[dict[str, Any]] = []
    call_ids: list[str] = []
    for one in conversation(name):
        if one.messages[-1]["role"] == "user":
            messages.append(one.messages[-1])
        messages += [
            {"role": "tool", "tool_call_id": call_id, "content": result}
            for call_id, result in zip(call_ids, results(one), strict=True)
        ]
        (answer,) = ask(service.openai, **service.request(one, messages=messages))
        service.confirm(answer, one)
        messages.append(answer.message)
        call_ids = [call.id for call in answer.tool_calls]


def _one(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of parameters with this one alone."""
    kept = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return {**kept, "additionalProperties": False}


def _validate(answer: Answer, tools: list[dict[str, Any]]) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for name, arguments in read(answer)["tool_calls"]:
        jsonschema.validate(arguments, schemas[name])
