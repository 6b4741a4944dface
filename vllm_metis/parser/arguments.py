# SPDX-License-Identifier: Apache-2.0
"""How the text of a tool parameter becomes the JSON of its argument.

The rule is the format's: a parameter whose schema admits strings only is raw text; anything else is
JSON if its text is JSON of a type that the schema admits, and text if it is not. JSON is passed on
as it was written, so no integer is rounded and no number reformatted. Where all strings that the schema
admits are listed, white space around one of them is nobody's.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from vllm_metis.parser.schema import items, mapping, resolve

_ANY_TYPE = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_TYPE_OF_FIRST_CHARACTER = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
# Some templates render values with Python's str(); a boolean or null can be nothing else.
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Admitted:
    """What a schema lets a value be."""

    types: frozenset[str] = _ANY_TYPE
    strings: frozenset[str] = frozenset()  # the strings among its enum and const values
    only_listed: bool = False  # no other string is admitted

    @property
    def only_strings(self) -> bool:
        return self.types == {"string"}

    @property
    def is_raw(self) -> bool:
        """Whether the text is the value, whatever it is, so that it can be streamed."""
        return self.only_strings and not self.only_listed

    def encode(self, text: str) -> str:
        """Return the JSON of a whole parameter text."""
        if self.only_listed and text not in self.strings and text.strip() in self.strings:
            return quote(text.strip())
        if self.only_strings or text in self.strings:
            return quote(text)
        written = _json_type(text)
        if written == "string" and self.types != _ANY_TYPE:
            return quote(text)  # where strings are raw text, quotes belong to the value
        if written in self.types or (written == "number" and self._is_integer(text)):
            return text.strip()
        literal = _PYTHON_LITERALS.get(text.strip())
        if literal and "string" not in self.types and _json_type(literal) in self.types:
            return literal
        return quote(text)

    def _is_integer(self, text: str) -> bool:
        """Whether the schema admits integers and this number, say 3.0, is one for JSON Schema."""
        if "integer" not in self.types:
            return False
        try:
            number = Decimal(text.strip())
            return number == number.to_integral_value()
        except ArithmeticError:  # an exponent that Decimal does not hold
            return False


TEXT = Admitted(types=frozenset({"string"}))
ANYTHING = Admitted()


class Parameters:
    """The parameters that a tool declares.

    Args:
        schema: the tool's JSON Schema; None for a tool that the request does not declare, or that
            declares no parameters: all its values are text.
    """

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root: Mapping[str, Any] = schema or {}
        self._objects = list(_objects(self._root, self._root, frozenset()))
        self._admitted: dict[str, Admitted] = {}

    def __contains__(self, name: str) -> bool:
        return any(name in mapping(schema, "properties") for schema in self._objects)

    def admitted(self, name: str) -> Admitted:
        """Return what the parameter may be; text when nothing is declared of it."""
        if name not in self._admitted:
            schema = self._schema(name)
            self._admitted[name] = (
                TEXT if schema is None else _admitted(schema, self._root, frozenset())
            )
        return self._admitted[name]

    def _schema(self, name: str) -> Any:
        for schema in self._objects:
            if name in (properties := mapping(schema, "properties")):
                return properties[name]
        for schema in self._objects:
            for pattern, value in mapping(schema, "patternProperties").items():
                if _matches(pattern, name):
                    return value
            if isinstance(schema.get("additionalProperties"), Mapping):
                return schema["additionalProperties"]
        return None


def quote(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _json_type(text: str) -> str | None:
    """Return the JSON type of the text, None when it is not JSON (RFC 8259)."""
    try:
        # Numbers are not converted: Python refuses integers of over 4300 digits.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    text = text.strip()
    if kind := _TYPE_OF_FIRST_CHARACTER.get(text[0]):
        return kind
    return "integer" if text.lstrip("-").isdigit() else "number"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _admitted(schema: Any, root: Mapping[str, Any], seen: frozenset[str]) -> Admitted:
    """Follow a schema to the types it admits; what cannot be followed admits anything."""
    if not isinstance(schema, Mapping):
        return ANYTHING
    limits = []
    if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        limits.append(_admitted(resolve(reference, root), root, seen | {reference}))
    limits += [_admitted(part, root, seen) for part in items(schema, "allOf")]
    for union in ("anyOf", "oneOf"):
        if branches := [_admitted(part, root, seen) for part in items(schema, union)]:
            texts = [branch for branch in branches if "string" in branch.types]
            limits.append(
                Admitted(
                    frozenset().union(*(branch.types for branch in branches)),
                    frozenset().union(*(branch.strings for branch in branches)),
                    only_listed=bool(texts) and all(branch.only_listed for branch in texts),
                )
            )
    if "type" in schema:
        limits.append(Admitted(_declared_types(schema["type"])))
    values = [schema["const"]] if "const" in schema else items(schema, "enum")
    if values:
        kinds = {_json_type(json.dumps(value)) or "string" for value in values}
        strings = frozenset(value for value in values if isinstance(value, str))
        limits.append(Admitted(_with_integers(kinds), strings, only_listed=bool(strings)))
    types = _ANY_TYPE.intersection(*(limit.types for limit in limits))
    if schema.get("nullable") is True:
        types |= {"null"}
    if "string" not in types:
        return Admitted(types or _ANY_TYPE)
    strings = frozenset().union(*(limit.strings for limit in limits))
    return Admitted(types, strings, only_listed=any(limit.only_listed for limit in limits))


def _declared_types(declared: Any) -> frozenset[str]:
    names = declared if isinstance(declared, list) else [declared]
    if not names or any(name not in _ANY_TYPE for name in names if isinstance(name, str)):
        return _ANY_TYPE
    return _with_integers({name for name in names if isinstance(name, str)}) or _ANY_TYPE


def _with_integers(types: set[str]) -> frozenset[str]:
    return frozenset(types | {"integer"} if "number" in types else types)


def _objects(
    schema: Any, root: Mapping[str, Any], seen: frozenset[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the object schemas that together declare a tool's parameters."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        yield from _objects(resolve(reference, root), root, seen | {reference})
    for group in ("allOf", "anyOf", "oneOf"):
        for part in items(schema, group):
            yield from _objects(part, root, seen)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False
