# SPDX-License-Identifier: Apache-2.0
"""`python -m harness schema`: the JSON schema of matrices, for editors, made of the models.

Settings are described by kind. In a file every mapping of settings may be a part of what a cell has
in the end, so no key of one is required here; that a cell is complete is told when the file is read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from harness import exit_codes
from harness.files import write_atomic
from harness.kinds import KINDS
from harness.matrices.expand import MATRICES
from harness.matrices.file import WrittenMatrix

SCHEMA_PATH = MATRICES / "schema.json"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a matrix file."""
    whole = WrittenMatrix.model_json_schema()
    definitions = whole.pop("$defs")
    by_kind = []
    for kind in KINDS.values():
        settings = kind.settings.model_json_schema()
        own = settings.pop("$defs", {})
        for name in _mapped(settings, own):
            own[name].pop("required", None)
        settings.pop("required", None)
        name = settings["title"]
        clashes = [key for key in own.keys() & definitions.keys() if own[key] != definitions[key]]
        assert not clashes, f"two models of the settings are called {', '.join(clashes)}"
        definitions |= {**own, name: settings}
        by_kind.append(
            {
                "if": {"properties": {"kind": {"const": kind.name}}},
                "then": {"properties": _settings_of({"$ref": f"#/$defs/{name}"})},
            }
        )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_for_editors(whole),
        "allOf": by_kind,
        "$defs": _for_editors(definitions),
    }


def text() -> str:
    """Return the schema as its file has it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _settings_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return where settings stand in a matrix."""
    in_list = {"items": {"properties": {"set": settings}}}
    return {
        "base": settings,
        "axes": {"additionalProperties": {"additionalProperties": settings}},
        "include": in_list,
        "overrides": in_list,
    }


def _mapped(node: Any, definitions: dict[str, Any]) -> Iterator[str]:
    """Yield the models that are reached through mappings alone: lists are replaced as a whole."""
    if isinstance(node, list):
        for part in node:
            yield from _mapped(part, definitions)
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        yield name
        yield from _mapped(definitions[name], definitions)
    for key, part in node.items():
        if key not in ("items", "discriminator"):
            yield from _mapped(part, definitions)


def _for_editors(node: Any) -> Any:
    """Return a schema without the titles that pydantic makes of names, and with closed mappings.

    pydantic says what keys of a pattern hold, and leaves all others free.
    """
    if isinstance(node, list):
        return [_for_editors(part) for part in node]
    if not isinstance(node, dict):
        return node
    found = {
        key: _for_editors(part)
        for key, part in node.items()
        if key != "title" or not isinstance(part, str)
    }
    if "patternProperties" in found:
        ((pattern, held),) = found.pop("patternProperties").items()
        found |= {"propertyNames": {"pattern": pattern}, "additionalProperties": held}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness schema`: there are none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Write matrices/schema.json and print its name."""
    del args
    write_atomic(SCHEMA_PATH, text())
    print(SCHEMA_PATH)
    return exit_codes.PASSED
