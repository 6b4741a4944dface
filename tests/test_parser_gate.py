# SPDX-License-Identifier: Apache-2.0
"""Structured outputs start the moment reasoning ends, and forced calls keep to the model's format."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from hypothesis import given
from vllm.v1.structured_output import StructuredOutputManager

from harness.replay import WHOLE
from tests.test_parser_properties import SETTINGS, SPLITS, TEXT
from tests.turns import DELTA_SIZES, TOOLS, Stage, Turn, spelled, stage
from vllm_metis.parser import MetisReasoningParser


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

CALL = Turn("", "", [("get_weather", {"city": "São\n\nPaulo", "days": 3})])
WRONG = Turn("", "", [("get_weather", {"city": "Faro", "days": "three"})])
NOW = Turn("", "", [("now", {})])
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def accepts(scene: Stage, request: dict[str, Any], text: str) -> bool:
    """Whether the grammar that the request asks for lets the model write the text and end."""
    strict = request.pop("strict", None)
    tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
    scene.answer(scene.encode("x"), WHOLE, tools=tools, **request)
    constraint = scene.engine.asked["sampling_params"].structured_outputs
    if constraint is None:
        return True
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(
        scene.tokenizer, vocab_size=len(scene.tokenizer), stop_token_ids=[0, 4]
    )
    compiler = xgrammar.GrammarCompiler(vocabulary)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(constraint.structural_tag))
    return (
        all(matcher.accept_token(token) for token in scene.encode(text)) and matcher.is_terminated()
    )


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
    two = call_text(scene, Turn("", "", CALL.calls * 2))
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
    assert answer.outcome == {
        "reasoning": "Hm.",
        "content": None,
        "tool_calls": [("now", "{}")],
        "finish_reason": "tool_calls",
    }


def test_a_schema_that_the_grammar_engine_cannot_follow_leaves_the_arguments_free(scene: Stage):
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}},
            },
        },
    }
    scene.answer(scene.encode("x"), WHOLE, tools=[tool], tool_choice="required")
    assert "<function=f>" in scene.engine.asked["sampling_params"].structured_outputs.structural_tag
