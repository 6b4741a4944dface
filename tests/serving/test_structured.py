# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: they bind the content from its first token, and never the reasoning before it."""

import json
import re
from typing import Any

import jsonschema
import pytest

from harness.prompts.conversations import turn
from tests.serving.service import Service, counted

CENTS = {
    "type": "object",
    "properties": {"cents": {"type": "integer"}},
    "required": ["cents"],
    "additionalProperties": False,
}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_json_object(service: Service):
    answer = service.ask("profile", response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.content), dict)
    service.confirm(answer, "profile")


# Where a constraint is not what the model has learned, it admits few texts and no white space: what the
# model writes then is anybody's guess, and it might never end.
CONSTRAINTS = {
    "choice": ({"choice": ["yes", "no"]}, "yes|no"),
    "regex": ({"regex": "(yes|no)"}, "yes|no"),
    "grammar": ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    "other choice": ({"choice": ["PERHAPS", "NEVER"]}, "PERHAPS|NEVER"),
    "other regex": ({"regex": r"#[0-9]{3}"}, "#[0-9]{3}"),
    "other grammar": ({"grammar": 'root ::= "[" [0-9] "]"'}, r"\[[0-9]\]"),
}


@pytest.mark.parametrize("direct", [False, True], ids=["thinking", "direct"])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_binds_the_content_alone(service: Service, name: str, direct: bool):
    constraint, pattern = CONSTRAINTS[name]
    extra: dict[str, Any] = {"structured_outputs": constraint}
    if direct:
        extra["chat_template_kwargs"] = {"enable_thinking": False}
    answer = service.ask("yes-or-no", extra_body=extra)
    assert re.fullmatch(pattern, answer.content)
    assert (answer.reasoning is None) is direct
    if not direct:
        content = "yes" if "yes" in pattern else answer.content
        service.confirm(answer, "yes-or-no", content=content)


# ball-quoted has both tags in its question, faro/2 a think block of the same turn in its prompt.
HISTORIES = ["second-turn/2", "faro/2", "ball-quoted", "no-reasoning"]


@pytest.mark.parametrize("name", HISTORIES)
def test_earlier_tags_do_not_mislead_a_schema(service: Service, name: str):
    answer = service.ask(name, response_format=json_schema({"enum": ["PERHAPS", "NEVER"]}))
    assert json.loads(answer.content) in {"PERHAPS", "NEVER"}
    service.confirm(answer, name, content=answer.content)


@pytest.mark.parametrize("name", HISTORIES)
def test_earlier_tags_do_not_mislead_a_regex(service: Service, name: str):
    answer = service.ask(name, extra_body={"structured_outputs": {"regex": "#[0-9]{3}"}})
    assert re.fullmatch("#[0-9]{3}", answer.content)
    service.confirm(answer, name, content=answer.content)


def test_hidden_reasoning_is_not_bound(service: Service):
    constraint = {"structured_outputs": {"regex": "#[0-9]{3}"}}
    shown = service.ask("sum", extra_body=constraint)
    hidden = service.ask("sum", extra_body=constraint | {"include_reasoning": False})
    assert hidden.reasoning is None
    assert re.fullmatch("#[0-9]{3}", hidden.content)
    if service.taught:
        assert hidden.content == shown.content
        assert counted(hidden) == counted(shown)


def test_every_choice_is_bound(service: Service):
    choices = service.choices("ball", n=3, temperature=0.05, response_format=json_schema(CENTS))
    assert len(choices) == 3
    for choice in choices:
        jsonschema.validate(json.loads(choice.content), CENTS)
        service.confirm(choice, "ball")


@pytest.mark.parametrize("name", ["ball", "ball-direct"])
def test_tools_may_be_declared_beside_a_schema(service: Service, name: str):
    answer = service.ask(name, tools=turn("lagos").tools, response_format=json_schema(CENTS))
    jsonschema.validate(json.loads(answer.content), CENTS)
    service.confirm(answer, name)
