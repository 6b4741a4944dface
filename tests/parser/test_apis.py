# SPDX-License-Identifier: Apache-2.0
"""What the Responses and the Messages API, and vLLM's parser interfaces themselves, make of a turn."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.abstract_parser import DelegatingParser

from harness.serving.replay import MODEL, WHOLE, Replay
from tests.parser.turns import DELTA_SIZES, QUESTION, TOOLS, WEATHER, Stage, spoken, stage
from vllm_metis.parser.adapters import MetisParser, MetisReasoningParser, MetisToolParser

STREAMED = DELTA_SIZES[1:]
ARGUMENTS = {"city": "Évora", "days": 3}
JSON_ARGUMENTS = '{"city": "Évora", "days": 3}'
CALL = spoken("Look it up.", "", [("get_weather", ARGUMENTS)])
TURNS = {
    "call": CALL,
    "text and call": spoken("Look it up.", "One moment.", [("get_weather", ARGUMENTS)]),
    "answer": spoken("Hm.", "Two."),
    "direct": spoken(None, "Two."),
    "cut in the reasoning": spoken("Hm, let me see."),
}


@pytest.fixture(scope="module")
def scene(checkpoint: Any) -> Stage:
    return stage(checkpoint())


def written(scene: Stage, name: str) -> list[int]:
    token_ids = scene.written(TURNS[name])
    return token_ids[:4] if name == "cut in the reasoning" else token_ids


def run(scene: Stage, handler: Any, request: Any, token_ids: Sequence[int], delta_size: int) -> Any:
    """Return the handler's response, or the events of its stream."""
    scene.engine.script = [token_ids]
    scene.engine.delta_sizes = [delta_size or 1]

    async def collect() -> Any:
        response = await handler(request)
        return [event async for event in response] if delta_size != WHOLE else response

    return asyncio.run(collect())


# Responses


def responses(scene: Stage, name: str, delta_size: int) -> Any:
    request = ResponsesRequest(
        model=MODEL,
        input="Go on.",
        tools=[{"type": "function", **WEATHER["function"]}],
        stream=delta_size != WHOLE,
        **({"reasoning": {"effort": "none"}} if TURNS[name].reasoning is None else {}),
    )
    handler = scene.both.responses.create_responses
    return run(scene, handler, request, written(scene, name), delta_size)


def items(response: Any) -> list[tuple[str, str]]:
    """Return the kind and the text of each item of a response."""
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


RESPONSE_ITEMS = {
    "call": [("reasoning", "Look it up."), ("function_call", JSON_ARGUMENTS)],
    "text and call": [
        ("reasoning", "Look it up."),
        ("message", "One moment."),
        ("function_call", JSON_ARGUMENTS),
    ],
    "answer": [("reasoning", "Hm."), ("message", "Two.")],
    "direct": [("message", "Two.")],
}


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
@pytest.mark.parametrize("name", RESPONSE_ITEMS)
def test_responses_items(scene: Stage, name: str, delta_size: int):
    result = responses(scene, name, delta_size)
    events = result if delta_size != WHOLE else []
    response = events[-1].response if events else result
    expected = RESPONSE_ITEMS[name]
    assert items(response) == expected
    assert response.status == "completed"
    reasoning_tokens = response.usage.output_tokens_details.reasoning_tokens
    assert (reasoning_tokens > 0) is (TURNS[name].reasoning is not None)
    if events:
        done = [e for e in events if e.type == "response.output_item.done"]
        assert [e.item.type for e in done] == [kind for kind, _ in expected]
        deltas = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
        deltas["response.function_call_arguments.delta"] = ""
        for event in events:
            if event.type in deltas:
                deltas[event.type] += event.delta
        assert sorted(filter(None, deltas.values())) == sorted(text for _, text in expected)


def test_a_response_replayed_as_input_renders_the_call_and_its_reasoning(scene: Stage):
    response = responses(scene, "call", WHOLE)
    call_id = next(item.call_id for item in response.output if item.type == "function_call")
    request = ResponsesRequest(
        model=MODEL,
        input=[
            {"role": "user", "content": "Go on."},
            *[item.model_dump(exclude_none=True) for item in response.output],
            {"type": "function_call_output", "call_id": call_id, "output": "dry"},
        ],
    )
    run(scene, scene.both.responses.create_responses, request, scene.encode("x"), WHOLE)
    prompt = scene.text(scene.engine.asked["prompt"]["prompt_token_ids"])
    assert "<think>\nLook it up.\n</think>\n<|tool_call|><function=get_weather>" in prompt
    assert "<|tool_result|>dry" in prompt


# Messages


def messages(scene: Stage, name: str, delta_size: int) -> Any:
    request = AnthropicMessagesRequest(
        model=MODEL,
        messages=[QUESTION],
        max_tokens=400,
        tools=[{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}],
        stream=delta_size != WHOLE,
        **({"thinking": {"type": "disabled"}} if TURNS[name].reasoning is None else {}),
    )
    handler = scene.both.messages.create_messages
    return run(scene, handler, request, written(scene, name), delta_size)


def blocks(result: Any) -> tuple[list[tuple[str, Any]], str]:
    """Return kind and substance of each content block, and the stop reason."""
    if not isinstance(result, list):
        content = [block.model_dump(exclude_none=True) for block in result.content]
        return [_block(block) for block in content], result.stop_reason
    content, stop_reason = [], ""
    for event in result:
        data = json.loads(event.split("data: ", 1)[1])
        if data["type"] == "content_block_start":
            content.append({**data["content_block"], "json": ""})
        elif data["type"] == "content_block_delta":
            for key, field in (
                ("thinking", "thinking"),
                ("text", "text"),
                ("partial_json", "json"),
            ):
                content[-1][field] = content[-1].get(field, "") + data["delta"].get(key, "")
        elif data["type"] == "message_delta":
            stop_reason = data["delta"]["stop_reason"]
    return [_block(block) for block in content], stop_reason


def _block(block: dict[str, Any]) -> tuple[str, Any]:
    if block["type"] == "tool_use":
        return "tool_use", json.loads(block["json"]) if block.get("json") else block["input"]
    return block["type"], block[block["type"]]


MESSAGE_BLOCKS = {
    "call": ([("thinking", "Look it up."), ("tool_use", ARGUMENTS)], "tool_use"),
    "text and call": (
        [("thinking", "Look it up."), ("text", "One moment."), ("tool_use", ARGUMENTS)],
        "tool_use",
    ),
    "answer": ([("thinking", "Hm."), ("text", "Two.")], "end_turn"),
    "direct": ([("text", "Two.")], "end_turn"),
    "cut in the reasoning": ([("thinking", "Hm, ")], "max_tokens"),
}


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
@pytest.mark.parametrize("name", MESSAGE_BLOCKS)
def test_messages_blocks(scene: Stage, name: str, delta_size: int):
    assert blocks(messages(scene, name, delta_size)) == MESSAGE_BLOCKS[name]


def test_a_cut_call_is_no_error_of_the_messages_api(scene: Stage):
    """Its input is an object, so what was written of the arguments has to be one."""
    token_ids = written(scene, "call")
    request = AnthropicMessagesRequest(
        model=MODEL,
        messages=[QUESTION],
        max_tokens=400,
        tools=[{"name": "get_weather", "input_schema": {}}],
    )
    for length in range(1, len(token_ids)):
        handler = scene.both.messages.create_messages
        result = run(scene, handler, request, token_ids[:length], WHOLE)
        assert result.stop_reason == "max_tokens"


# vLLM's parser interfaces, as other code than its own servers may use them

TEXT = "Hm.\n</think>\n\nNow: <|tool_call|><function=now>\n</function><|fim_suffix|>"


def test_the_parsers_read_plain_text(scene: Stage):
    request = ChatCompletionRequest(messages=[QUESTION], tools=TOOLS)
    reasoning, content = MetisReasoningParser(scene.tokenizer).extract_reasoning(TEXT, request)
    assert reasoning == "Hm."
    assert content == "Now: <|tool_call|><function=now>\n</function>"
    result = MetisToolParser(scene.tokenizer, request.tools).extract_tool_calls(content, request)
    assert [(call.function.name, call.function.arguments) for call in result.tool_calls] == [
        ("now", "{}")
    ]
    assert result.content == "Now:"


def test_a_whole_text_without_a_closing_tag_is_no_reasoning_where_no_prompt_is_shown(scene: Stage):
    request = ChatCompletionRequest(messages=[QUESTION])
    parser = scene.both.chat.parser_cls(scene.tokenizer, None)
    assert parser.parse("Two.<|fim_suffix|>", request)[:2] == (None, "Two.")
    assert parser.parse("Hm, let me", request)[:2] == ("Hm, let me", None)


@pytest.mark.parametrize("delta_size", [WHOLE, 1, 2, 3, 7])
def test_another_tool_parser_gets_the_content(scene: Stage, delta_size: int):
    server = Replay(scene.engine, "metis", "hermes")
    text = (
        'Hm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|fim_suffix|>'
    )
    answer = scene.answer(scene.encode(text), delta_size, server)
    assert answer.reasoning == "Hm."
    assert answer.said["tool_calls"] == [("now", "{}")]


def test_a_tokenizer_without_the_marker_is_refused():
    class OtherTokenizer:
        all_special_tokens, all_special_ids = [], []

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(ValueError, match=r"need a tokenizer with the token <\|tool_call\|>"):
        MetisReasoningParser(OtherTokenizer())


def test_a_server_composes_one_parser_of_the_two(scene: Stage):
    for server in (scene.both, scene.reasoning_only, scene.tool_only):
        assert issubclass(server.chat.parser_cls, MetisParser)
    mixed = Replay(scene.engine, "metis", "hermes").chat.parser_cls
    assert issubclass(mixed, DelegatingParser)
    assert not issubclass(mixed, MetisParser)

    class Bystander:
        parser = MetisReasoningParser

    assert Bystander.__bases__ == (object,)


def test_importing_the_parsers_does_not_touch_a_gpu():
    code = "import vllm_metis.parser.adapters, torch; print(torch.cuda.is_initialized())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split()[-1] == "False"
