# SPDX-License-Identifier: Apache-2.0
"""A parameter's text becomes the JSON value that its schema says it is."""

import json
from typing import Any

import pytest

from vllm_metis.parser.arguments import Parameters

INTEGER, STRING, OBJECT = {"type": "integer"}, {"type": "string"}, {"type": "object"}
NULL, ARRAY = {"type": "null"}, {"type": "array", "items": {"type": "integer"}}
DEFINITIONS = {
    "Count": INTEGER,
    "Chained": {"$ref": "#/$defs/Count"},
    "Circle": {"$ref": "#/$defs/Other"},
    "Other": {"anyOf": [{"$ref": "#/$defs/Circle"}, NULL]},
    "a/b~c": INTEGER,
    "Colour": {"enum": ["red", "green"]},
}
DEEP = "[" * 100_000 + "]" * 100_000


def encoded(schema: Any, text: str) -> str:
    parameters = Parameters({"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS})
    return parameters.admitted("x").encode(text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # strings are raw
        (STRING, '{"a": 1}', '{"a": 1}'),
        (STRING, "null", "null"),
        (STRING, ' "x"\n', ' "x"\n'),
        # other types are JSON
        (INTEGER, "3", 3),
        (INTEGER, " 3\n", 3),
        (INTEGER, "-0", 0),
        (INTEGER, "3.0", 3),
        (INTEGER, "1e3", 1000),
        (INTEGER, "9223372036854775809", 9223372036854775809),
        ({"type": "number"}, "9007199254740993", 9007199254740993),
        ({"type": "number"}, "1e3", 1000),
        ({"type": "boolean"}, "true", True),
        (NULL, "null", None),
        (OBJECT, '{"a": [1, "2"]}', {"a": [1, "2"]}),
        (ARRAY, "[1,\n 2]", [1, 2]),
        # what is not JSON of an admitted type is text
        (INTEGER, "three", "three"),
        (INTEGER, "3.5", "3.5"),
        (INTEGER, "007", "007"),
        (INTEGER, '"3"', '"3"'),
        (INTEGER, "true", "true"),
        (INTEGER, "1e99999999999999999999", "1e99999999999999999999"),
        (INTEGER, "", ""),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "perhaps", "perhaps"),
        ({"type": "boolean"}, "1", "1"),
        (OBJECT, "{'a': 1}", "{'a': 1}"),
        (OBJECT, "[1]", "[1]"),
        (ARRAY, DEEP, DEEP),
        # Python's spelling of a value that can be nothing else
        ({"type": "boolean"}, "True", True),
        ({"anyOf": [OBJECT, NULL]}, "None", None),
        ({"anyOf": [STRING, NULL]}, "None", "None"),
        (OBJECT, "None", "None"),
        # unions
        ({"anyOf": [INTEGER, NULL]}, "5", 5),
        ({"anyOf": [INTEGER, NULL]}, "null", None),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"oneOf": [STRING, NULL]}, "7", "7"),
        ({"oneOf": [STRING, NULL]}, '"7"', '"7"'),
        ({"type": ["integer", "string"]}, "3", 3),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": ["array", "null"]}, '["a"]', ["a"]),
        ({"anyOf": [OBJECT, STRING]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [OBJECT, STRING]}, "plain", "plain"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        (INTEGER, "null", "null"),
        # references
        ({"$ref": "#/$defs/Count"}, "5", 5),
        ({"$ref": "#/$defs/Chained"}, "5", 5),
        ({"$ref": "#/$defs/a~1b~0c"}, "x", "x"),
        ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "d"}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/Count"}, NULL]}, "null", None),
        ({"$ref": "#/$defs/Circle"}, "null", None),
        ({"$ref": "#/$defs/Missing"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "https://example.com/schema"}, "5", 5),
        # enum and const
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["auto", 1]}, "auto", "auto"),
        ({"enum": ["1", 2, "null", None]}, "1", "1"),
        ({"enum": ["1", 2, "null", None]}, "2", 2),
        ({"enum": ["1", 2, "null", None]}, "null", "null"),
        ({"const": "true"}, "true", "true"),
        ({"const": True}, "true", True),
        # where all strings are listed, white space around one is nobody's
        ({"enum": ["red", "green"]}, " red", "red"),
        ({"type": "string", "enum": ["red", "green"]}, "green\n", "green"),
        ({"const": "a b"}, "\ta b ", "a b"),
        ({"anyOf": [{"enum": ["red"]}, NULL]}, " red", "red"),
        ({"anyOf": [{"enum": ["red"]}, NULL]}, " null", None),
        ({"anyOf": [{"enum": ["red"]}, {"const": "green"}]}, " green", "green"),
        ({"allOf": [STRING, {"enum": ["red"]}]}, " red", "red"),
        ({"$ref": "#/$defs/Colour"}, " red", "red"),
        ({"enum": ["1", 2]}, " 1", "1"),
        ({"enum": ["1", 2]}, " 2", 2),
        ({"enum": ["red", " red"]}, " red", " red"),
        ({"enum": ["red", "green"]}, " blue", " blue"),
        ({"enum": ["red", ""]}, " ", ""),
        ({"anyOf": [{"enum": ["red"]}, STRING]}, " red", " red"),
        ({"enum": [1, 2], "type": "string"}, " red", " red"),
        # no type at all
        ({}, '{"a": 1}', {"a": 1}),
        ({"description": "d"}, "5", 5),
        ({}, "late fees", "late fees"),
        ({}, "None", "None"),
        (True, "[1]", [1]),
        ({"type": "geometry"}, "[1]", [1]),
        ({"type": []}, "5", 5),
        ({"type": [{"type": "string"}]}, "5", 5),
        ({"type": 7, "enum": 7, "anyOf": 7, "$ref": 7}, "5", 5),
    ],
)
def test_the_value_of_a_text(schema: Any, text: str, value: Any):
    result = json.loads(encoded(schema, text))
    assert result == value
    assert isinstance(result, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    "text", ["12345678901234567890123", "0.1000000000000000055511151231", "1e400"]
)
def test_numbers_are_passed_on_as_they_were_written(text: str):
    assert encoded({"type": "number"}, text) == text


def test_an_integer_of_any_length_is_an_integer():
    digits = "9" * 5000  # Python itself refuses to convert these
    assert encoded(INTEGER, digits) == digits


def test_a_tool_that_declares_nothing_gives_text():
    for schema in (None, {}, {"type": "object"}, {"properties": None}):
        assert Parameters(schema).admitted("x").encode("5") == '"5"'


def test_a_parameter_that_is_not_declared_is_text_unless_the_schema_says_more():
    declared = {"properties": {"y": INTEGER}}
    assert Parameters(declared).admitted("x").encode("5") == '"5"'
    additional = Parameters({**declared, "additionalProperties": {"type": "integer"}})
    assert additional.admitted("x").encode("5") == "5"
    pattern = Parameters({**declared, "patternProperties": {"^x": INTEGER, "(": STRING}})
    assert pattern.admitted("x").encode("5") == "5"
    assert pattern.admitted("z").encode("5") == '"5"'


def test_parameters_are_found_through_the_schemas_own_references():
    parameters = Parameters(
        {"allOf": [{"$ref": "#/$defs/Args"}], "$defs": {"Args": {"properties": {"x": INTEGER}}}}
    )
    assert "x" in parameters
    assert parameters.admitted("x").encode("5") == "5"
