# SPDX-License-Identifier: Apache-2.0
"""YAML read strictly: every fault of a file at once, each with its line.

PyYAML's loader drops line numbers and lets a repeated key win silently, so the document is composed
into nodes and built from them here; jsonschema then judges it, and each of its errors is given the
line of the node it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Place = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Fault:
    """One thing wrong with a file."""

    line: int
    message: str


class MatrixError(ValueError):
    """A matrix file cannot be used; the message holds every fault as `file:line: fault`."""

    def __init__(self, path: Path, faults: list[Fault]):
        self.path, self.faults = path, sorted(set(faults))
        super().__init__(
            "\n".join(f"{path}:{fault.line}: {fault.message}" for fault in self.faults)
        )


@dataclass(frozen=True)
class Document:
    """A file's data, and the line of each of its nodes."""

    data: Any
    lines: dict[Place, int]
    text: str

    def line(self, place: Place) -> int:
        """The line of a node, or of the nearest one above it that the file spells out."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def load(path: Path, schema: dict[str, Any]) -> Document:
    """Read a file and check it against a JSON schema.

    Raises:
        MatrixError: with all faults: unreadable, not YAML, keys given twice, everything the schema
        forbids.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise MatrixError(path, [Fault(1, f"cannot be read: {error.strerror}")]) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise MatrixError(path, [Fault(line, f"not YAML: {error.problem}")]) from error
    if node is None:
        raise MatrixError(path, [Fault(1, "the file is empty")])
    lines: dict[Place, int] = {}
    faults: list[Fault] = []
    data = _build(node, (), lines, faults)
    document = Document(data, lines, text)
    faults += [Fault(document.line(place), message) for place, message in _violations(data, schema)]
    if faults:
        raise MatrixError(path, faults)
    return document


def _build(node: yaml.Node, place: Place, lines: dict[Place, int], faults: list[Fault]) -> Any:
    lines[place] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in mapping:
                faults.append(Fault(line, f"key {key!r} is given twice"))
            child = (*place, key)
            mapping[key] = _build(value_node, child, lines, faults)
            lines[child] = line
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [
            _build(item, (*place, index), lines, faults) for index, item in enumerate(node.value)
        ]
    return yaml.SafeLoader("").construct_object(node)


def _violations(data: Any, schema: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(data):
        place: Place = tuple(error.absolute_path)
        name = ".".join(str(part) for part in place) or "the file"
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            allowed = sorted(error.schema.get("properties", {}))
            for key in sorted(set(error.instance) - set(allowed)):
                yield (*place, key), f"unknown key {key!r} in {name}; allowed: {', '.join(allowed)}"
        elif error.validator == "enum":
            known = ", ".join(str(value) for value in error.validator_value)
            yield place, f"{name}: {error.instance!r} is not one of {known}"
        else:
            yield place, f"{name}: {error.message}"
