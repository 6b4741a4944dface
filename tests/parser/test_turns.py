# SPDX-License-Identifier: Apache-2.0
"""Turns as the chat template renders them come back as API fields, whole and in every delta size."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.prompts.conversations import Turn
from harness.serving.replay import WHOLE, ReplayError
from tests.parser.turns import DELTA_SIZES, MODELS, QUESTION, TOOLS, Stage, spoken, stage

CALL = ("get_weather", {"city": "São\n\n Paulo ", "days": 3})
CODE = ("write_file", {"path": "a.py", "content": 'def f():\n    return "</parameter>"\n'})
TURNS = {
    "thinking": spoken("Compare:\n1 < 2.", "Two is <b>larger</b>.\n\nYes"),
    "direct": spoken(None, "Two.\n"),
    "empty think block": spoken("", "Two."),
    "call": spoken("Look it up.", "", [CALL]),
    "text, then calls": spoken("Look it up.", "One moment.", [CALL, ("now", {}), CODE]),
    "direct call": spoken(None, "", [CODE]),
    "undeclared tool": spoken("Hm.", "", [("book_taxi", {"seats": 4, "to": "5"}), CALL]),
    "quoted markup": spoken(
        "He writes <|tool_call|> and <think>.",
        "A call is <|tool_call|><function=f>\n</function>, </think> ends thought.",
        [
            (
                "write_file",
                {"path": "<function=f>", "content": "<|tool_call|>\n</function>\n<|fim_suffix|>"},
            )
        ],
    ),
    "unicode": spoken("Évora 👩‍🚀\u2028", "ひ\u00a0«»", [("get_weather", {"city": "Loulé\u00a0"})]),
}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "first turn": [QUESTION],
    "after a tool round": [
        QUESTION,
        TURNS["call"].message,
        {"role": "tool", "tool_call_id": "call_0", "content": "dry"},
    ],
    "after quoted tags": [
        {"role": "user", "content": "What is <think> for, and </think>?"},
        TURNS["quoted markup"].message,
        {"role": "user", "content": "It ends with <think>"},
    ],
}


@pytest.fixture(scope="module", params=MODELS)
def scene(request: pytest.FixtureRequest, checkpoint: Any) -> Stage:
    return stage(checkpoint() if request.param == "tiny" else Path(request.param))


def expected(turn: Turn) -> dict[str, Any]:
    calls = []
    for name, values in turn.calls:
        if name not in {one["function"]["name"] for one in TOOLS}:
            values = {key: str(value) for key, value in values.items()}
        calls.append((name, json.dumps(values, ensure_ascii=False)))
    return {
        "reasoning": turn.reasoning or None,
        "content": turn.content or None,
        "tool_calls": calls,
        "finish_reason": "tool_calls" if calls else "stop",
    }


# Whole, and by single tokens: matrices/parsers.yaml sweeps the sizes in between over other turns, and
# test_properties.py any split of any turn.
ENDS = (WHOLE, 1)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", TURNS)
def test_a_rendered_turn_comes_back(scene: Stage, name: str, history: str):
    turn = TURNS[name]
    token_ids = scene.written(turn, HISTORIES[history])
    request = {
        "messages": HISTORIES[history],
        "chat_template_kwargs": turn.chat_template_kwargs,
    }
    for delta_size in ENDS:
        assert scene.answer(token_ids, delta_size, **request).said == expected(turn), delta_size


@pytest.mark.parametrize("name", TURNS)
def test_a_cut_turn_gives_what_was_written(scene: Stage, name: str):
    turn = TURNS[name]
    token_ids = scene.written(turn)
    whole = expected(turn)
    for length in range(1, len(token_ids)):
        cut = [
            scene.answer(
                token_ids,
                size,
                max_completion_tokens=length,
                chat_template_kwargs=turn.chat_template_kwargs,
            ).said
            for size in ENDS
        ]
        text = scene.text(token_ids[:length])
        assert all(outcome == cut[0] for outcome in cut), text
        assert cut[0]["finish_reason"] == "length", text
        assert (whole["reasoning"] or "").startswith(cut[0]["reasoning"] or ""), text
        assert (whole["content"] or "").startswith((cut[0]["content"] or "").rstrip()), text
        for (cut_name, arguments), (full_name, full_arguments) in zip(
            cut[0]["tool_calls"], whole["tool_calls"], strict=False
        ):
            assert cut_name == full_name, text
            full = json.loads(full_arguments)
            for key, value in json.loads(arguments).items():
                assert str(full[key]).startswith(str(value)), text


@pytest.mark.parametrize("length", [4, 9, 14])
def test_nothing_written_before_a_cut_is_lost(scene: Stage, length: int):
    """But for what may be the beginning of a tag, the text is there to the last character."""
    token_ids = scene.encode("First I compare the two numbers; then I add the digits.")
    text = scene.text(token_ids[:length])
    for size in DELTA_SIZES:
        answer = scene.answer(token_ids[:length], size)
        assert (answer.reasoning, answer.content) == (text, None)
        answer = scene.answer(
            token_ids[:length], size, chat_template_kwargs={"enable_thinking": False}
        )
        assert (answer.reasoning, answer.content) == (None, text)


@pytest.mark.parametrize("size", DELTA_SIZES)
class TestRequests:
    """What a request asks for, and what the server has."""

    turn = TURNS["text, then calls"]

    def test_tool_choice_none_drops_calls_and_nothing_else(self, scene: Stage, size: int):
        token_ids = scene.encode(
            "Hm.\n</think>\nBefore.<|tool_call|><function=now>\n</function> After.<|fim_suffix|>"
        )
        answer = scene.answer(token_ids, size, tool_choice="none")
        assert answer.said == {
            "reasoning": "Hm.",
            "content": "Before. After.",
            "tool_calls": [],
            "finish_reason": "stop",
        }

    def test_tool_choice_none_drops_a_call_straight_out_of_the_reasoning(
        self, scene: Stage, size: int
    ):
        token_ids = scene.encode("Hm.<|tool_call|><function=now>\n</function><|fim_suffix|>")
        answer = scene.answer(token_ids, size, tool_choice="none")
        assert (answer.reasoning, answer.content, answer.tool_calls) == ("Hm.", None, [])

    def test_without_a_tool_parser_calls_are_text(self, scene: Stage, size: int):
        token_ids = scene.written(spoken("Hm.", "Now: ", [("now", {})]))
        answer = scene.answer(token_ids, size, scene.reasoning_only, tools=None)
        assert answer.said == {
            "reasoning": "Hm.",
            "content": "Now: <|tool_call|><function=now>\n</function>",
            "tool_calls": [],
            "finish_reason": "stop",
        }

    def test_without_a_reasoning_parser_reasoning_is_text(self, scene: Stage, size: int):
        answer = scene.answer(scene.written(self.turn), size, scene.tool_only)
        assert answer.reasoning is None
        assert answer.content == "Look it up.\n</think>\nOne moment."
        assert answer.said["tool_calls"] == expected(self.turn)["tool_calls"]

    def test_without_a_reasoning_parser_none_still_drops_calls(self, scene: Stage, size: int):
        """vLLM does not ask the parser about such a request, so its text has no markers at all."""
        token_ids = scene.written(spoken(None, "é\u00a0<|tool_call|>!", [("now", {}), CALL]))
        answer = scene.answer(token_ids, size, scene.tool_only, tool_choice="none")
        assert (answer.content, answer.tool_calls) == ("é\u00a0<|tool_call|>!", [])

    @pytest.mark.parametrize(
        "forced", ["required", {"type": "function", "function": {"name": "now"}}]
    )
    def test_forced_calls_are_read_in_the_models_format(self, scene: Stage, size: int, forced: Any):
        token_ids = scene.written(spoken("Hm.", "", [("now", {})]))
        answer = scene.answer(token_ids, size, tool_choice=forced)
        assert answer.said == {
            "reasoning": "Hm.",
            "content": None,
            "tool_calls": [("now", "{}")],
            "finish_reason": "tool_calls" if forced == "required" else "stop",
        }

    def test_every_choice_reads_the_prompt(self, scene: Stage, size: int):
        """The prompt is closed by another template, so no switch of the request tells the mode."""
        template = "{{ '<|fim_prefix|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
        request = {"messages": [QUESTION], "chat_template": template}
        script = [scene.encode("391<|fim_suffix|>"), scene.encode("392"), scene.encode("<think>")]
        answers = scene.both.answers(request, script, size)
        assert [answer.content for answer in answers] == ["391", "392", "<think>"]
        assert [answer.reasoning for answer in answers] == [None] * 3

    @pytest.mark.parametrize("thinks", [True, False])
    def test_hidden_reasoning_is_told_from_the_prompt_too(
        self, scene: Stage, size: int, thinks: bool
    ):
        tail = "<think>\\n" if thinks else "<think>\\n\\n</think>\\n\\n"
        request = {
            "messages": [QUESTION],
            "chat_template": "{{ '<|fim_prefix|>assistant\\n" + tail + "' }}",
            "include_reasoning": False,
        }
        text = "Hm.\n</think>\nTwo.<|fim_suffix|>" if thinks else "Two."
        for answer in scene.both.answers(request, [scene.encode(text)] * 2, size):
            assert (answer.reasoning, answer.content) == (None, "Two.")
        assert scene.engine.asked["reasoning_ended"] is not thinks

    def test_stop_strings_hold_the_text_back_behind_its_ids(self, scene: Stage, size: int):
        answer = scene.answer(
            scene.written(TURNS["unicode"]), size, stop=["a string that never comes " * 3]
        )
        assert answer.said == expected(TURNS["unicode"])

    @pytest.mark.parametrize(
        "forced", ["required", {"type": "function", "function": {"name": "now"}}]
    )
    def test_a_stop_string_before_a_required_call_leaves_none(
        self, scene: Stage, size: int, forced: Any
    ):
        token_ids = scene.written(spoken("Hm, now.", "", [("now", {})]))
        answer = scene.answer(token_ids, size, tool_choice=forced, stop=["now"])
        assert answer.said == {
            "reasoning": "Hm, ",
            "content": None,
            "tool_calls": [],
            "finish_reason": "stop",
        }

    def test_every_choice_of_a_required_call_is_read_alike(self, scene: Stage, size: int):
        script = [scene.written(spoken("Hm.", "", [("now", {})] * n)) for n in (1, 0, 2)]
        request = {"messages": [QUESTION], "tools": TOOLS, "tool_choice": "required"}
        answers = scene.both.answers(request, script, size)
        assert [len(answer.tool_calls) for answer in answers] == [1, 0, 2]
        assert [answer.finish_reason for answer in answers] == ["tool_calls", "stop", "tool_calls"]
        assert all(answer.content is None for answer in answers)

    def test_a_stop_string_ends_a_call_like_a_cut(self, scene: Stage, size: int):
        answer = scene.answer(scene.written(TURNS["text, then calls"]), size, stop=["def"])
        assert answer.said["tool_calls"] == [
            *expected(TURNS["text, then calls"])["tool_calls"][:2],
            ("write_file", '{"path": "a.py"}'),
        ]


@pytest.mark.parametrize(
    ("tail", "reasoning", "content"),
    [
        ("<think>\n", "A", "B"),
        ("<think>", "A", "B"),
        ("<think>\nQuotes <think>, goes on.", "A", "B"),
        ("<think>\n\n</think>\n\n", None, "A\n</think>\nB"),
        ("<think>\n\n</think>", None, "A\n</think>\nB"),
        ("<think>\nDone.\n</think>\nThe tag <think> is", None, "A\n</think>\nB"),
        ("", None, "A\n</think>\nB"),
    ],
)
def test_the_mode_is_read_from_the_prompt(scene: Stage, tail: str, reasoning: Any, content: str):
    prompt = f"<|fim_prefix|>user\nWhat are <think> and </think>?<|fim_suffix|>{tail}"
    request = {"chat_template": "{{ " + json.dumps(prompt) + " }}"}
    for size in DELTA_SIZES:
        answer = scene.answer(scene.encode("A\n</think>\nB<|fim_suffix|>"), size, **request)
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_a_prompt_without_a_think_block_lets_the_model_open_one(scene: Stage):
    request = {"chat_template": "{{ '<|fim_prefix|>assistant\\n' }}"}
    for size in DELTA_SIZES:
        answer = scene.answer(
            scene.encode("\n<think>\nA\n</think>\n\nB<|fim_suffix|>"), size, **request
        )
        assert (answer.reasoning, answer.content) == ("A", "B")
        answer = scene.answer(scene.encode(" <thin air>"), size, **request)
        assert (answer.reasoning, answer.content) == (None, " <thin air>")


@pytest.mark.parametrize(
    "switch", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}]
)
def test_either_switch_turns_thinking_off(scene: Stage, switch: dict[str, Any]):
    for size in DELTA_SIZES:
        answer = scene.answer(scene.encode("Two.<|fim_suffix|>"), size, **switch)
        assert (answer.reasoning, answer.content) == (None, "Two.")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_past_reasoning_reaches_the_prompt_under_either_name(scene: Stage, field: str):
    message = TURNS["call"].message
    message[field] = message.pop("reasoning")
    history = [QUESTION, message, {"role": "tool", "tool_call_id": "call_0", "content": "dry"}]
    scene.answer(scene.encode("x"), messages=history)
    prompt = scene.text(scene.engine.asked["prompt"]["prompt_token_ids"])
    assert "<think>\nLook it up.\n</think>\n<|tool_call|><function=get_weather>" in prompt
    assert "<parameter=days>\n3\n</parameter>" in prompt
    scene.answer(scene.encode("x"), messages=[*history, QUESTION])
    prompt = scene.text(scene.engine.asked["prompt"]["prompt_token_ids"])
    assert "Look it up." not in prompt


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "."),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_served(
    scene: Stage, request_fields: dict[str, Any], message: str
):
    for size in (WHOLE, 1):
        with pytest.raises(ReplayError, match=message):
            scene.answer(scene.encode("x"), size, **request_fields)
        assert scene.answer(scene.encode("x\n</think>\ny"), size).content == "y"
