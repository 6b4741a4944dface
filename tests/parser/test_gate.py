# SPDX-License-Identifier: Apache-2.0
"""Structured outputs start the moment reasoning ends, and forced calls keep to the model's format."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from hypothesis import given
from vllm.v1.structured_output import StructuredOutputManager

from harness.prompts.conversations import Turn
from harness.serving.replay import WHOLE, ReplayError
from tests.parser.strategies import SETTINGS, SPLITS, TEXT
from tests.parser.turns import DELTA_SIZES, TOOLS, Stage, spelled, spoken, stage, tool
from vllm_metis.parser.adapters import MetisReasoningParser


@pytest.fixture(scope="module")
def scene(checkpoint: Any) -> Stage:
    return stage(checkpoint())


@pytest.fixture(scope="module")
def gate(scene: Stage) -> StructuredOutputManager:
    """vLLM's own gate with this reasoning parser; building all of it would start a backend."""
    manager = object.__new__(StructuredOutputManager)
    manager.reasoner_cls = MetisReasoningParser
    manager.tokenizer = scene.tokenizer
    manager.enable_in_reasoning = False
    return manager


def constrained_from(
    gate: StructuredOutputManager, prompt: list[int], output: list[int], split: list[int]
) -> int:
    """Return the index of the first output token that the grammar binds."""
    state = SimpleNamespace(
        reasoning_ended=None, reasoner=None, reasoning_parser_kwargs=None, grammar=None
    )
    request = SimpleNamespace(
        structured_output_request=state, prompt_token_ids=prompt, all_token_ids=list(prompt)
    )
    start, sizes = 0, iter(split * len(output))
    if gate._get_constraint_start(request, ()) == 0:
        return 0
    while start < len(output):
        new = output[start : start + next(sizes)]
        request.all_token_ids += new
        bound = gate._get_constraint_start(request, new, spec_tokens_committed=True)
        if bound <= len(new):
            return start + bound
        start += len(new)
    return len(output)


@given(reasoning=TEXT.filter(lambda text: "</think>" not in text), split=SPLITS)
@SETTINGS
def test_the_grammar_binds_from_the_token_after_the_reasoning(
    scene: Stage, gate: StructuredOutputManager, reasoning: str, split: list[int]
):
    prompt = scene.encode(
        "<|fim_prefix|>user\n</think>?<|fim_suffix|><|fim_prefix|>assistant\n<think>\n"
    )
    output = scene.encode(spelled(reasoning) + "\n</think>\n\n")
    rest = scene.encode('{"a": "</think>"}')
    assert constrained_from(gate, prompt, output + rest, split) == len(output)


@pytest.mark.parametrize("split", [[1], [2], [3], [7], [100]])
def test_a_call_ends_the_reasoning_too(
    scene: Stage, gate: StructuredOutputManager, split: list[int]
):
    prompt = scene.encode("<|fim_prefix|>assistant\n<think>\n")
    output = scene.encode("So I call </thin and<|tool_call|>")
    rest = scene.encode("<function=now>\n</function>")
    assert constrained_from(gate, prompt, output + rest, split) == len(output)
    output = scene.encode(spelled("So <|tool_call|>"))
    assert constrained_from(gate, prompt, output, split) == len(output)


def test_in_direct_mode_the_grammar_binds_from_the_first_token(
    scene: Stage, gate: StructuredOutputManager
):
    history = "<|fim_prefix|>assistant\n<think>\nold\n"
    prompt = scene.encode(history + "<|fim_suffix|><|fim_prefix|>assistant\n<think>\n\n</think>\n")
    assert constrained_from(gate, prompt, scene.encode('{"a": 1}'), [1]) == 0


class CountingList(list):
    """Counts the items that are read of it."""

    read = 0

    def __getitem__(self, key):
        items = super().__getitem__(key)
        self.read += len(items) if isinstance(key, slice) else 1
        return items

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()


def test_asking_does_no_work_proportional_to_the_output(scene: Stage):
    parser = MetisReasoningParser(scene.tokenizer)
    read = set()
    for length in (1_000, 64_000):
        output = CountingList(scene.encode("a < b ") * (length // 4))
        assert not parser.is_reasoning_end_streaming(output, output[-2:])
        read.add(output.read)
    assert len(read) == 1
    assert read.pop() < 20


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
def test_what_shares_a_token_with_the_closing_tag_is_not_doubled(scene: Stage, delta_size: int):
    """A grammar begins after that token, so it asks for the bracket that the token held already."""
    vocabulary = scene.tokenizer.get_vocab()
    glued = [*scene.encode("Hm.\n</think"), vocabulary["><"]]
    assert scene.text(glued).endswith("</think><")
    request = {"structured_outputs": {"regex": "<b>.*"}}
    answer = scene.answer(glued + scene.encode("<b>x<|fim_suffix|>"), delta_size, **request)
    assert (answer.reasoning, answer.content) == ("Hm.", "<b>x")
    answer = scene.answer(glued + scene.encode("b>x<|fim_suffix|>"), delta_size)
    assert (answer.reasoning, answer.content) == ("Hm.", "<b>x")


# Forced and strict calls

CALL = spoken("", "", [("get_weather", {"city": "São\n\nPaulo", "days": 3})])
WRONG = spoken("", "", [("get_weather", {"city": "Faro", "days": "three"})])
NOW = spoken("", "", [("now", {})])
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NOW_TOOL = tool("now")
NAMED_NOW = {"type": "function", "function": {"name": "now"}}


def accepts(scene: Stage, request: dict[str, Any], text: str) -> bool:
    """Whether the grammar that the request asks for lets the model write the text and end."""
    request = {"tools": TOOLS, **request}
    strict = request.pop("strict", None)
    request["tools"] = [
        {**one, "function": {**one["function"], "strict": strict}} for one in request["tools"]
    ]
    return accepts_tokens(scene, request, scene.encode(text))


def accepts_tokens(scene: Stage, request: dict[str, Any], token_ids: list[int]) -> bool:
    scene.answer(scene.encode("x"), WHOLE, **request)
    constraint = scene.engine.asked["sampling_params"].structured_outputs
    if constraint is None:
        return True
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(
        scene.tokenizer, vocab_size=len(scene.tokenizer), stop_token_ids=[0, 4]
    )
    compiler = xgrammar.GrammarCompiler(vocabulary)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(constraint.structural_tag))
    return all(matcher.accept_token(token) for token in token_ids) and matcher.is_terminated()


def call_text(scene: Stage, turn: Turn) -> str:
    return scene.text(scene.written(turn)).removeprefix("\n</think>\n")


@pytest.mark.parametrize("before", ["", "\n", "\n\n"])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_asked_for_in_the_models_format(scene: Stage, choice: Any, before: str):
    request = {"tool_choice": choice}
    assert accepts(scene, request, before + call_text(scene, CALL))
    assert not accepts(scene, request, before + call_text(scene, WRONG))
    assert not accepts(scene, request, before + "I would rather not.<|fim_suffix|>")
    assert not accepts(scene, request, before + json.dumps([{"name": "now"}]) + "<|fim_suffix|>")
    assert accepts(scene, request, before + call_text(scene, NOW)) == (choice == "required")


def test_several_calls_may_be_required_and_one_is_named(scene: Stage):
    two = call_text(scene, spoken("", "", CALL.calls * 2))
    assert accepts(scene, {"tool_choice": "required"}, two)
    assert not accepts(scene, {"tool_choice": NAMED}, two)


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_tools_bind_the_arguments_of_calls_that_the_model_chooses(scene: Stage, strict: Any):
    request = {"tool_choice": "auto", "strict": strict}
    assert accepts(scene, dict(request), "No call.<|fim_suffix|>")
    assert accepts(scene, dict(request), "I call." + call_text(scene, CALL))
    assert accepts(scene, dict(request), call_text(scene, WRONG)) is not bool(strict)


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
def test_the_second_marker_that_a_grammar_asks_for_is_no_second_call(scene: Stage, delta_size: int):
    """After a call straight out of the reasoning, of which the grammar has not seen the marker."""
    text = "Hm.<|tool_call|>" + call_text(scene, NOW)
    answer = scene.answer(scene.encode(text), delta_size, tool_choice="required")
    assert answer.said == {
        "reasoning": "Hm.",
        "content": None,
        "tool_calls": [("now", "{}")],
        "finish_reason": "tool_calls",
    }


# White space around a value


VALUES = {
    "enum": ({"enum": ["red", "green"]}, ["red"]),
    "enum of types": ({"enum": ["red", 3, None]}, ["red", "3", "null"]),
    "const": ({"const": "a b"}, ["a b"]),
    "pattern": ({"type": "string", "pattern": "^a+b$"}, ["aab"]),
    "format": ({"type": "string", "format": "date"}, ["2026-11-30"]),
    "longest": ({"type": "string", "maxLength": 3}, ["red"]),
    "optional enum": ({"anyOf": [{"enum": ["red"]}, {"type": "null"}]}, ["red", "null"]),
    "reference": ({"$ref": "#/$defs/colour"}, ["red"]),
    "integer": ({"type": "integer"}, ["3"]),
    "integers": ({"enum": [1, 2]}, ["2"]),
    "boolean": ({"type": "boolean"}, ["true"]),
    "object": ({"type": "object"}, ['{"a":  [1]}']),
}
SPACES = ["{} ", " {}", "\n{}", "{}\n", "\t{}\t"]


def call_of_f(value: str) -> str:
    return f"<|tool_call|><function=f>\n<parameter=x>\n{value}\n</parameter>\n</function><|fim_suffix|>"


@pytest.mark.parametrize("request_fields", [{"tool_choice": "required"}, {"strict": True}])
@pytest.mark.parametrize("name", VALUES)
def test_the_only_white_space_around_a_bound_value_is_the_templates(
    scene: Stage, name: str, request_fields: dict[str, Any]
):
    schema, values = VALUES[name]
    declared = tool("f", {"x": schema}, required=["x"], **{"$defs": {"colour": {"enum": ["red"]}}})
    request = {"tools": [declared], **request_fields}
    for value in values:
        assert accepts(scene, request, call_of_f(value))
        for space in SPACES:
            assert not accepts(scene, request, call_of_f(space.format(value))), space


def test_white_space_is_part_of_a_bound_text(scene: Stage):
    """It counts for the length that is asked for, and the parser keeps it."""
    request = {"tool_choice": "required"}
    for schema in ({"type": "string"}, {"type": "string", "minLength": 2, "maxLength": 2}):
        request["tools"] = [tool("f", {"x": schema}, required=["x"])]
        for value in ("ab", " a", "\n\n"):
            assert accepts(scene, request, call_of_f(value))
            answer = scene.answer(scene.encode(call_of_f(value)), WHOLE, **request)
            assert json.loads(answer.tool_calls[0].arguments) == {"x": value}
    assert not accepts(scene, request, call_of_f("a"))


def test_values_of_a_tool_that_is_not_strict_keep_to_their_lines_too(scene: Stage):
    request = {"tools": [tool("f", {"x": {"enum": ["a"]}}), tool("g")], "tool_choice": "auto"}
    request["tools"][1]["function"]["strict"] = True
    scene.answer(scene.encode("x"), WHOLE, **request)
    tag = scene.engine.asked["sampling_params"].structured_outputs.structural_tag
    assert r'">\\n\" xml_any \"\\n</parameter>' in tag


# Schemas that no grammar follows


FAULTY = {
    "type": ({"properties": {"x": {"type": "objekt"}}}, "objekt"),
    "reference": ({"properties": {"x": {"$ref": "#/$defs/nowhere"}}}, "nowhere"),
    "circle": ({"$ref": "#"}, "nothing fits"),
    "endless": ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "fits"),
    "lookbehind": ({"properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}, "ookbehind"),
    "no value": ({"properties": {"x": {"enum": []}}}, "empty"),
    "no object": ({"type": "string"}, "an object"),
}
BINDING = {
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    "strict": {"tool_choice": "auto"},
}


@pytest.mark.parametrize("delta_size", [WHOLE, 1])
@pytest.mark.parametrize("binding", BINDING)
@pytest.mark.parametrize("name", FAULTY)
def test_a_tool_that_cannot_be_bound_is_refused_by_name(
    scene: Stage, name: str, binding: str, delta_size: int
):
    schema, fault = FAULTY[name]
    declared = {"name": "f", "parameters": schema, "strict": binding == "strict"}
    request = {"tools": [NOW_TOOL, {"type": "function", "function": declared}], **BINDING[binding]}
    with pytest.raises(ReplayError, match=f"refused the request: .* tool f .*{fault}"):
        scene.answer(scene.encode("x"), delta_size, **request)


@pytest.mark.parametrize(
    "request_fields", [{"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": NAMED_NOW}]
)
def test_a_tool_that_is_not_bound_may_have_any_schema(scene: Stage, request_fields: dict[str, Any]):
    tools = [NOW_TOOL, tool("f", {"x": {"type": "objekt"}})]
    token_ids = scene.written(NOW)
    answer = scene.answer(token_ids, WHOLE, tools=tools, **request_fields)
    assert len(answer.tool_calls) == (request_fields["tool_choice"] != "none")


@pytest.mark.parametrize("schema", [{}, {"title": "F"}, {"type": ["object", "null"]}])
def test_parameters_are_an_object_where_the_schema_leaves_it_open(
    scene: Stage, schema: dict[str, Any]
):
    declared = {"type": "function", "function": {"name": "f", "parameters": schema}}
    request = {"tools": [declared], "tool_choice": "required"}
    assert accepts(scene, request, call_of_f("anything"))
    assert not accepts(scene, request, "<|tool_call|><function=f>\nnull</function><|fim_suffix|>")


@pytest.mark.parametrize("delta_size", [WHOLE, 1])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_circular_schema_for_the_content_is_refused(scene: Stage, delta_size: int, as_text: bool):
    schema = {"$ref": "#"}
    request: dict[str, Any] = {"structured_outputs": {"json": json.dumps(schema)}}
    if not as_text:
        form = {"name": "answer", "schema": schema}
        request = {"response_format": {"type": "json_schema", "json_schema": form}}
    with pytest.raises(ReplayError, match="lead back to themselves"):
        scene.answer(scene.encode("x"), delta_size, **request)


# Special tokens where a grammar takes them for their spelling


TEXT_OF_SPECIAL = "a <|tool_call|><function=now>\n</function> <|padding|>b"
JSON_TEXT = json.dumps({"x": TEXT_OF_SPECIAL})
JSON_OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_in_bound_content_a_special_token_is_text(
    scene: Stage, delta_size: int, thinks: bool, choice: str
):
    request = {**JSON_OBJECT, "tool_choice": choice}
    request["chat_template_kwargs"] = {"enable_thinking": thinks}
    token_ids = scene.encode(("Hm.\n</think>\n" if thinks else "") + JSON_TEXT + "<|fim_suffix|>")
    answer = scene.answer(token_ids, delta_size, **request)
    assert answer.said == {
        "reasoning": "Hm." if thinks else None,
        "content": JSON_TEXT,
        "tool_calls": [],
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
@pytest.mark.parametrize("binding", [*BINDING, "free"])
def test_in_a_bound_value_a_special_token_is_text(scene: Stage, delta_size: int, binding: str):
    request: dict[str, Any] = BINDING.get(binding, {"tool_choice": "auto"})
    declared = tool("f", {"x": {"type": "string"}})
    declared["function"]["strict"] = binding == "strict"
    request = {"tools": [declared, NOW_TOOL], **request}
    text = call_of_f(TEXT_OF_SPECIAL)
    if binding != "free":
        assert accepts_tokens(scene, request, scene.encode(text))
    answer = scene.answer(scene.encode("\n</think>\n" + text), delta_size, **request)
    called = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    if binding == "free":  # the model forgot to close the first
        assert [name for name, _ in called] == ["f", "now"]
    else:
        assert called == [("f", {"x": TEXT_OF_SPECIAL})]


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
@pytest.mark.parametrize("value", ["a\n</function>", "a\n<parameter=y>\nb", "<|tool_call|>"])
def test_the_next_call_begins_where_the_grammar_has_it_begin(
    scene: Stage, delta_size: int, value: str
):
    """Also after a value that quotes tags, which is held back until the call's end."""
    request = {"tools": [tool("f", {"x": {"type": "string"}})], "tool_choice": "required"}
    text = call_of_f(value).removesuffix("<|fim_suffix|>") + call_of_f("b")
    assert accepts_tokens(scene, request, scene.encode(text))
    answer = scene.answer(scene.encode("\n</think>\n" + text), delta_size, **request)
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"x": value}, {"x": "b"}]


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
def test_an_answer_may_stand_where_strict_calls_may(scene: Stage, delta_size: int):
    """vLLM lets the model choose between the two; what it begins with decides."""
    strict = [{**NOW_TOOL, "function": {**NOW_TOOL["function"], "strict": True}}]
    request = {"tools": strict, **JSON_OBJECT}
    answer = scene.answer(scene.encode("\n</think>\n" + JSON_TEXT), delta_size, **request)
    assert (answer.content, answer.tool_calls) == (JSON_TEXT, [])
    answer = scene.answer(scene.written(NOW), delta_size, **request)
    assert [call.name for call in answer.tool_calls] == ["now"]


@pytest.mark.parametrize("delta_size", DELTA_SIZES)
def test_a_call_straight_out_of_the_reasoning_is_not_bound(scene: Stage, delta_size: int):
    """Its marker comes before the grammar, so the next marker is one wherever it stands."""
    strict = [{**NOW_TOOL, "function": {**NOW_TOOL["function"], "strict": True}}]
    text = "Hm." + call_of_f("a <|tool_call|><function=now>\n</function>")
    answer = scene.answer(scene.encode(text), delta_size, tools=strict)
    assert [call.name for call in answer.tool_calls] == ["f", "now"]
