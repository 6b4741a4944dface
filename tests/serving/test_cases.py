# SPDX-License-Identifier: Apache-2.0
"""The cases of tests/cases/serving.yaml, each by its id: what was reported of other servers and models.

A case gives the tools, the request and what must come; the messages are those of the scripted turn in
which the taught model writes what the case is about.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from harness.prompts.conversations import turn
from harness.serving.client import whole
from tests.serving import messages, responses
from tests.serving.service import Service, counted, read

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in yaml.safe_load((Path(__file__).parents[1] / "cases" / "serving.yaml").read_text())
}
TESTED: set[str] = set()


def case(case_id: str) -> pytest.MarkDecorator:
    """Give a test the case, and its name the case's id."""
    TESTED.add(case_id)
    return pytest.mark.parametrize("case", [pytest.param(CASES[case_id], id=case_id)])


def test_every_case_is_tested():
    assert set(CASES) == TESTED


def expected(case: dict[str, Any], **differences: Any) -> dict[str, Any]:
    """Return what must come, as `read` gives it."""
    wanted = case["expected"]
    calls = [(call["name"], call["arguments"]) for call in wanted.get("tool_calls", ())]
    return {
        "reasoning": wanted.get("reasoning"),
        "content": wanted.get("content"),
        "tool_calls": calls,
        "finish_reason": wanted.get("finish_reason", "tool_calls" if calls else "stop"),
    } | differences


@case("G2-06-truncated-inside-a-value")
def test_a_call_that_is_cut_is_no_finished_call(service: Service, case: dict[str, Any]):
    answer = service.ask("notes-direct", tools=case["tools"], tool_choice="auto", max_tokens=34)
    assert answer.finish_reason == "length"
    assert not answer.content
    if service.taught:
        ((name, arguments),) = read(answer)["tool_calls"]
        assert name == "write_file"
        assert arguments == {"path": "notes.txt", "content": "first line\nsecond"}


@case("G2-12-usage-chunk")
def test_usage_comes_last_and_alone(service: Service, case: dict[str, Any]):
    options = case["request"]["stream_options"]
    request = service.request("tomar", tools=case["tools"])
    create = service.openai.chat.completions.create
    chunks = list(create(stream=True, stream_options=options, **request))
    ended = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    (answer,) = whole(service.openai, **request)
    assert [chunk.choices[0].finish_reason for chunk in ended] == [answer.finish_reason]
    *others, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == counted(answer)[1] or not service.taught
    assert last.usage.completion_tokens_details.reasoning_tokens > 0
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in others)
    for options in ({"stream_options": {}}, {}):
        assert all(chunk.usage is None for chunk in create(stream=True, **options, **request))
    if service.taught:
        assert read(answer) == expected(case, reasoning="Look it up.")


@case("G2-12-usage-chunk")
def test_a_direct_answer_has_no_reasoning_tokens(service: Service, case: dict[str, Any]):
    answer = service.ask("lagos-direct", tools=case["tools"])
    assert counted(answer)[2] == 0


@case("G3-07-history-with-reasoning-content")
def test_past_reasoning_is_read_under_either_name(service: Service, case: dict[str, Any]):
    question, call, result = case["request"]["messages"]
    reasoning = call["reasoning_content"]
    bare = {key: value for key, value in call.items() if key != "reasoning_content"}

    def prompt(*messages: dict[str, Any]) -> str:
        return service.prompt("faro", tools=case["tools"], messages=messages)

    names = [["reasoning_content"], ["reasoning"], ["reasoning", "reasoning_content"]]
    prompts = {prompt(question, bare | dict.fromkeys(keys, reasoning), result) for keys in names}
    assert len(prompts) == 1
    text = prompts.pop()
    assert f"<think>\n{reasoning}\n</think>" in text
    assert "<|tool_call|><function=get_weather>" in text
    for key, value in json.loads(call["tool_calls"][0]["function"]["arguments"]).items():
        assert f"<parameter={key}>\n{value}\n</parameter>" in text

    parts = [{"type": "text", "text": result["content"]}]
    assert prompt(question, call, {**result, "content": parts}) == text
    later = prompt(question, call, result, {"role": "user", "content": "And tomorrow?"})
    assert reasoning not in later
    assert result["content"] in later


@case("G3-07-history-with-reasoning-content")
def test_the_answer_after_past_reasoning_is_known(service: Service, case: dict[str, Any]):
    service.confirm(
        service.ask("faro/2", tools=case["tools"], messages=case["request"]["messages"]), "faro/2"
    )


@pytest.mark.xfail(
    strict=True,
    reason="vLLM takes them for no arguments, so that a conversation goes on: "
    "https://github.com/vllm-project/vllm/pull/48922",
)
@case("G3-07-history-with-reasoning-content")
def test_past_arguments_that_are_not_json_are_refused(service: Service, case: dict[str, Any]):
    history = json.loads(json.dumps(case["request"]["messages"]))
    history[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Fa'
    body = {"model": service.model, "messages": history, "tools": case["tools"]}
    response = service.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400


@case("G3-08-required-and-named-while-thinking")
@pytest.mark.parametrize(
    "choice",
    CASES["G3-08-required-and-named-while-thinking"]["request"]["tool_choice"],
    ids=["required", "named"],
)
@pytest.mark.parametrize("name", ["lagos", "lagos-direct"])
def test_a_forced_call_comes_after_the_thinking(
    service: Service, case: dict[str, Any], choice: Any, name: str
):
    answer = service.ask(name, tools=case["tools"], tool_choice=choice)
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.tool_calls
    if choice != "required":
        assert [call.name for call in answer.tool_calls] == ["get_weather"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case["tools"]}
    for called, arguments in read(answer)["tool_calls"]:
        jsonschema.validate(arguments, schemas[called])
    assert bool(answer.reasoning) is turn(name).enable_thinking
    if service.taught:
        direct = {} if turn(name).enable_thinking else {"reasoning": None}
        assert read(answer) == expected(case, finish_reason=answer.finish_reason, **direct)


@pytest.mark.taught
@case("G3-08-required-and-named-while-thinking")
@pytest.mark.parametrize(
    "choice",
    CASES["G3-08-required-and-named-while-thinking"]["request"]["tool_choice"],
    ids=["required", "named"],
)
def test_finish_reason_is_never_tool_calls_without_a_call(
    service: Service, case: dict[str, Any], choice: Any
):
    """A stop string comes before it; vLLM by itself says tool_calls (vllm-project/vllm#53255)."""
    answer = service.ask("lagos", tools=case["tools"], tool_choice=choice, stop=["ask"])
    service.confirm(
        answer, "lagos", reasoning="They ", content=None, tool_calls=[], finish_reason="stop"
    )


G3_10 = "G3-10-json-schema-and-thinking"


@case(G3_10)
@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("name", ["ball", "ball/2", "ball-quoted", "ball-direct", "ball-direct/2"])
def test_a_schema_binds_after_the_thinking(
    service: Service, case: dict[str, Any], name: str, hidden: bool
):
    """Of the turns, ball/2 and ball-direct/2 have an earlier turn, ball-quoted the tags in its question."""
    response_format = case["request"]["response_format"]
    extra = {"include_reasoning": False} if hidden else {}
    answer = service.ask(name, response_format=response_format, extra_body=extra)
    jsonschema.validate(json.loads(answer.content), response_format["json_schema"]["schema"])
    assert answer.tool_calls == []
    thinks = turn(name).enable_thinking
    assert bool(answer.reasoning) is (thinks and not hidden)
    assert (counted(answer)[2] > 0) is thinks
    service.confirm(answer, name, **({"reasoning": None} if hidden else {}))
    if service.taught and name == "ball":
        assert read(answer) == expected(case, **({"reasoning": None} if hidden else {}))


@case("G3-12-responses-api")
def test_responses_brings_reasoning_and_call_alone(service: Service, case: dict[str, Any]):
    """`responses.ask` joins the deltas of the events, and asks whole and streamed."""
    tools = [{"type": "function", **tool["function"]} for tool in case["tools"]]
    response = responses.ask(service, turn("redirect"), tools=tools)
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    wanted = expected(case)
    if service.taught:
        assert responses.items(response) == [
            ("reasoning", wanted["reasoning"]),
            *(("function_call", call) for call in wanted["tool_calls"]),
        ]


@pytest.mark.taught
@case("G3-12-responses-api")
def test_responses_takes_its_items_back(service: Service, case: dict[str, Any]):
    for one, response in responses.play(service, "redirect"):
        responses.confirm(service, response, one)


@case("G3-13-anthropic-messages")
def test_messages_brings_thinking_and_call_alone(service: Service, case: dict[str, Any]):
    """`messages.ask` joins the parts of the input, and asks whole and streamed."""
    tools = messages.converted(case["tools"])
    message = messages.ask(service, turn("sines"), tools=tools)
    wanted = expected(case)
    if service.taught:
        assert message.stop_reason == "tool_use"
        assert messages.blocks(message) == [
            ("thinking", wanted["reasoning"]),
            *(("tool_use", call) for call in wanted["tool_calls"]),
        ]


@pytest.mark.taught
@case("G3-13-anthropic-messages")
def test_messages_takes_its_blocks_back(service: Service, case: dict[str, Any]):
    (_, called), (one, answered) = messages.play(service, "sines")
    assert called.stop_reason == "tool_use"
    assert answered.stop_reason == "end_turn"
    messages.confirm(service, answered, one)
    usage = answered.usage
    prompt = service.prompt(one)
    assert "<think>\nLook it up.\n</think>" in prompt
    tokens = service.http.post(
        "/tokenize", json={"model": service.model, "prompt": prompt, "add_special_tokens": False}
    )
    assert usage.input_tokens + usage.cache_read_input_tokens == tokens.json()["count"]
