# SPDX-License-Identifier: Apache-2.0
"""For any turn that the template can render: what was written comes back, however it is delivered."""

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.prompts.conversations import Turn
from harness.serving.replay import WHOLE
from tests.parser.strategies import FRAGMENTS, SETTINGS, SPLITS, TEXT
from tests.parser.turns import Stage, spoken, stage, tool

SPACE = " \t\r\n"

# Where a value holds these as the template writes them, nobody can tell them from the template's.
UNDECIDABLE = re.compile(r"\n</parameter>\s*(?:<parameter=|</function>|$)")
VALUE = TEXT.filter(lambda text: not UNDECIDABLE.search(f"\n{text}\n"))
WRITE = tool("write", {"path": {"type": "string"}, "text": {"type": "string"}})
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["write", "undeclared"]),
        st.dictionaries(st.sampled_from(["path", "text", "more"]), VALUE, max_size=3),
    ),
    max_size=3,
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    reasoning = draw(st.none() | TEXT.filter(lambda text: "</think>" not in text))
    content, calls = draw(TEXT), draw(CALLS)
    if reasoning is not None:  # the line breaks after </think> are the template's
        content = content.lstrip("\n")
    if calls:  # white space before a call is nobody's
        content = content.rstrip(SPACE)
    return spoken(reasoning, content, calls)


@pytest.fixture(scope="module")
def scene(checkpoint: Any) -> Stage:
    return stage(checkpoint())


@given(turn=turns(), split=SPLITS)
@SETTINGS
def test_any_turn_comes_back_however_it_is_split(scene: Stage, turn: Turn, split: list[int]):
    token_ids = scene.written(turn)
    request = {"tools": [WRITE], "chat_template_kwargs": turn.chat_template_kwargs}
    for delta_size in (WHOLE, split):
        answer = scene.answer(token_ids, delta_size, **request)
        assert (answer.reasoning or None) == (turn.reasoning or None)
        assert (answer.content or None) == (turn.content or None)
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        assert calls == turn.calls
        assert answer.finish_reason == ("tool_calls" if calls else "stop")


@given(turn=turns(), split=SPLITS, data=st.data())
@SETTINGS
def test_a_cut_turn_is_the_same_however_it_is_split(
    scene: Stage, turn: Turn, split: list[int], data: st.DataObject
):
    # Cut behind a tag in a value, nobody can tell whether the value was to close it.
    assume(not any("<parameter=" in value for _, values in turn.calls for value in values.values()))
    token_ids = scene.written(turn)[:-1]
    assume(token_ids)
    token_ids = token_ids[: data.draw(st.integers(1, len(token_ids)), label="length")]
    request = {"tools": [WRITE], "chat_template_kwargs": turn.chat_template_kwargs}
    whole = scene.answer(token_ids, WHOLE, **request)
    assert scene.answer(token_ids, split, **request).said == whole.said
    assert whole.finish_reason == "length"
    assert (turn.reasoning or "").startswith(whole.reasoning or "")
    assert turn.content.startswith((whole.content or "").rstrip(SPACE))
    for call, (name, values) in zip(whole.tool_calls, turn.calls, strict=False):
        assert call.name == name
        for key, value in json.loads(call.arguments).items():
            assert values[key].startswith(value)


MARKUP = [
    "<|tool_call|>",
    "<|fim_suffix|>",
    "<|padding|>",
    "<function=write>\n",
    "<function=",
    "\n",
]
MARKUP += [
    "<parameter=path>\n",
    "<parameter=text\n",
    "\n</parameter>\n",
    "</function>",
    "</think>\n",
]


@given(
    pieces=st.lists(st.sampled_from(MARKUP) | st.sampled_from(FRAGMENTS), min_size=1, max_size=20),
    split=SPLITS,
    thinks=st.booleans(),
)
@SETTINGS
def test_any_tokens_whatever_are_read_the_same_however_they_are_split(
    scene: Stage, pieces: list[str], split: list[int], thinks: bool
):
    """The markers are real tokens here, wherever they stand."""
    token_ids = scene.encode("".join(pieces))
    request = {"tools": [WRITE], "chat_template_kwargs": {"enable_thinking": thinks}}
    whole = scene.answer(token_ids, WHOLE, **request)
    assert scene.answer(token_ids, split, **request).said == whole.said
    for call in whole.tool_calls:
        json.loads(call.arguments)
    for text in (whole.reasoning, whole.content):
        assert "<|tool_call|>" not in (text or "")


QUOTED = st.lists(
    st.sampled_from(["a", "", "</function>", "<function=f>", "text </parameter>"])
    | st.sampled_from(
        ["<parameter=path>\n1\n</parameter>", "<parameter=y>\n</parameter>\n</function>"]
    ),
    max_size=6,
).map("\n".join)


@given(values=st.fixed_dictionaries({"path": QUOTED, "text": QUOTED}), split=SPLITS)
@SETTINGS
def test_a_value_may_quote_whole_parameters_and_calls(
    scene: Stage, values: dict[str, str], split: list[int]
):
    turn = spoken(None, "", [("write", values), ("undeclared", values)])
    token_ids = scene.written(turn)
    for delta_size in (WHOLE, split):
        answer = scene.answer(
            token_ids, delta_size, tools=[WRITE], chat_template_kwargs=turn.chat_template_kwargs
        )
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == turn.calls


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "string": VALUE,
    "integer": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(JSON, max_size=3),
    "object": OBJECTS,
}


@st.composite
def typed(draw: st.DrawFn) -> tuple[Any, Any]:
    """Return a schema, in one of the spellings that clients send, and a value that it admits."""
    kind = draw(st.sampled_from(list(OF_TYPE)))
    value = draw(OF_TYPE[kind])
    spelling = draw(
        st.sampled_from(["plain", "optional", "list", "nullable", "ref", "enum", "none"])
    )
    if kind == "string":
        assume(spelling != "none")  # text of no declared type is JSON where it can be
        assume(spelling == "plain" or value.strip() != "null")
    schema = {"type": kind}
    match spelling:
        case "optional":
            schema = {draw(st.sampled_from(["anyOf", "oneOf"])): [schema, {"type": "null"}]}
        case "list":
            schema = {"type": [kind, "null"]}
        case "nullable":
            schema = {**schema, "nullable": True}
        case "ref":
            schema = {draw(st.sampled_from(["allOf", "anyOf"])): [{"$ref": f"#/$defs/{kind}"}]}
        case "enum":
            schema = {"enum": [value]}
        case "none":
            schema = {"description": "anything"}
    return schema, value


@given(parameters=st.dictionaries(st.sampled_from("abc"), typed(), min_size=1), split=SPLITS)
@SETTINGS
def test_typed_arguments_round_trip(
    scene: Stage, parameters: dict[str, tuple[Any, Any]], split: list[int]
):
    definitions = {kind: {"type": kind} for kind in OF_TYPE}
    declared = tool(
        "f", {key: schema for key, (schema, _) in parameters.items()}, **{"$defs": definitions}
    )
    values = {key: value for key, (_, value) in parameters.items()}
    token_ids = scene.written(spoken("", "", [("f", values)]))
    for delta_size in (WHOLE, split):
        answer = scene.answer(token_ids, delta_size, tools=[declared])
        assert json.loads(answer.tool_calls[0].arguments) == values


@given(
    before=st.lists(st.integers(7, 262), max_size=12),
    after=st.lists(st.integers(7, 262), max_size=12),
    split=SPLITS,
    tool_choice=st.sampled_from(["auto", "none"]),
)
@SETTINGS
def test_bytes_that_are_no_text_do_not_move_the_markers(
    scene: Stage, before: list[int], after: list[int], split: list[int], tool_choice: str
):
    """The ids 7 to 262 are the single bytes, most sequences of which are no UTF-8."""
    call = scene.encode("<|tool_call|><function=undeclared>\n</function>")
    token_ids = [*before, *call, *after, *scene.encode(".<|fim_suffix|>")]
    request = {
        "tool_choice": tool_choice,
        "tools": [WRITE],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    whole = scene.answer(token_ids, WHOLE, **request)
    assert scene.answer(token_ids, split, **request).said == whole.said
    names = [call.name for call in whole.tool_calls]
    assert names == (["undeclared"] if tool_choice == "auto" else [])
    assert "function" not in (whole.content or "")
