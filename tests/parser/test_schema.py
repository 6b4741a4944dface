# SPDX-License-Identifier: Apache-2.0
"""A schema is circular if no finite value fits it."""

from typing import Any

import pytest

from vllm_metis.parser.schema import is_circular

SELF, ITEM = {"$ref": "#"}, {"$ref": "#/$defs/a"}


def defined(**definitions: Any) -> dict[str, Any]:
    return {**ITEM, "$defs": definitions}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        {"allOf": [SELF]},
        {"anyOf": [SELF]},
        {"anyOf": [SELF, {"oneOf": [SELF]}]},
        {"anyOf": [{"type": "null"}], **SELF},
        defined(a={"$ref": "#/$defs/b"}, b=ITEM),
        {"type": "object", "properties": {"x": SELF}, "required": ["x"]},
        {"type": ["object"], "properties": {"x": SELF}, "required": ["x"]},
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}, "required": ["x"]},
    ],
)
def test_nothing_fits(schema: Any):
    assert is_circular(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        None,
        {"type": "string"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"$ref": 7},
        {"anyOf": [SELF, {"type": "null"}]},
        defined(a={"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}, b=ITEM),
        {"type": "object", "properties": {"x": SELF}},
        {"properties": {"x": SELF}, "required": ["x"]},
        {
            "type": "object",
            "properties": {"x": {"type": "array", "items": SELF}},
            "required": ["x"],
        },
        {"type": "array", "items": SELF},
        {"type": ["object", "null"], "properties": {"x": SELF}, "required": ["x"]},
        {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
        {"type": "object", "properties": 7, "required": 7, "allOf": 7, "$ref": "#/properties"},
    ],
)
def test_something_fits(schema: Any):
    assert not is_circular(schema)


def test_many_references_are_followed_in_no_time():
    """Each of these leads to two others, so there are 2**200 ways to the end."""
    steps = {
        f"s{n}": {"allOf": [{"$ref": f"#/$defs/s{n + 1}"}, {"$ref": f"#/$defs/s{n + 1}"}]}
        for n in range(200)
    }
    assert not is_circular(defined(a={"$ref": "#/$defs/s0"}, s200={"type": "null"}, **steps))
    assert is_circular(defined(a={"$ref": "#/$defs/s0"}, s200=ITEM, **steps))
