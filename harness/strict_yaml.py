# SPDX-License-Identifier: Apache-2.0
"""YAML read strictly: every fault of a file at once, each with its line.

PyYAML's loader drops line numbers and lets a repeated key win silently, so the document is composed
into nodes and built from them here; pydantic models then judge it, and each of their errors is given
the line of the node that it names.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

Place = tuple[str | int, ...]

_Model = TypeVar("_Model")


class StrictModel(BaseModel):
    """A mapping of a YAML file: nothing is converted, and every key is known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True, order=True)
class Fault:
    """One thing wrong with a file."""

    line: int
    message: str


class YamlError(ValueError):
    """A file cannot be used; the message holds every fault as `file:line: fault`."""

    def __init__(self, path: Path, faults: Iterable[Fault]):
        self.path, self.faults = path, sorted(set(faults))
        super().__init__(
            "\n".join(f"{path}:{fault.line}: {fault.message}" for fault in self.faults)
        )


@dataclass(frozen=True)
class Document:
    """A file's data, and the line of each of its nodes."""

    path: Path
    data: Any
    lines: dict[Place, int]

    def line(self, place: Place) -> int:
        """The line of a node, or of the nearest one above it that the file spells out."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def at(self, place: Place) -> Any:
        """The data of a node."""
        data = self.data
        for key in place:
            data = data[key]
        return data

    def read(self, model: type[_Model] | Any) -> _Model:
        """Return the whole file as a model, any type that pydantic validates.

        Raises:
            YamlError: with everything that the model forbids.
        """
        try:
            read: _Model = TypeAdapter(model).validate_python(self.data)
        except ValidationError as error:
            raise YamlError(self.path, self.faults(error, (), model)) from error
        return read

    def faults(
        self, error: ValidationError, place: Place, model: Any, *, partial: bool = False
    ) -> Iterator[Fault]:
        """Yield what a model finds wrong with the node at a place.

        Args:
            model: what was validated, to tell which keys it knows.
            partial: other mappings will be laid over this one, so that what it lacks is no fault.
        """
        expectations: dict[Place, list[str]] = {}
        for one in error.errors(include_url=False):
            if partial and _is_incomplete(one):
                continue
            at = (*place, *inside(one["loc"], self.at(place)))
            name = ".".join(map(str, at)) or "the file"
            if one["type"] == "extra_forbidden":
                allowed = ", ".join(sorted(_keys(model, one["loc"][:-1])))
                parent = ".".join(map(str, at[:-1])) or "the file"
                text = f"unknown key {at[-1]!r} in {parent}; allowed: {allowed}"
                yield Fault(self.line(at), text)
            elif one["type"] == "missing":
                yield Fault(self.line(at), f"{name}: {one['loc'][-1]} is missing")
            elif one["type"] == "union_tag_not_found":
                yield Fault(self.line(at), f"{name}: {key_of_union(one)} is missing")
            elif one["type"] == "union_tag_invalid":
                key, known = key_of_union(one), one["ctx"]["expected_tags"]
                text = f"{name}.{key}: expected {known}, found {one['ctx']['tag']!r}"
                yield Fault(self.line((*at, key)), text)
            elif one["type"] == "value_error":
                yield Fault(self.line(at), f"{name}: {one['ctx']['error']}")
            else:
                expectations.setdefault(at, []).append(_expected(one))
        for at, texts in expectations.items():
            name = ".".join(map(str, at)) or "the file"
            found = _shown(self.at(at))
            yield Fault(self.line(at), f"{name}: expected {' or '.join(texts)}, found {found}")


def load(path: Path) -> Document:
    """Read a file.

    Raises:
        YamlError: with all faults: unreadable, not YAML, keys given twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise YamlError(path, [Fault(1, f"cannot be read: {error.strerror}")]) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(path, [Fault(line, f"not YAML: {error.problem}")]) from error
    if node is None:
        raise YamlError(path, [Fault(1, "the file is empty")])
    lines: dict[Place, int] = {}
    faults: list[Fault] = []
    data = _build(node, (), lines, faults)
    if faults:
        raise YamlError(path, faults)
    return Document(path, data, lines)


def inside(loc: Place, data: Any) -> Place:
    """Return the part of an error's place that is a place of the data.

    pydantic names members of unions, and the keys of mappings apart from their values, in between.
    """
    found: list[str | int] = []
    for step in loc:
        known = isinstance(data, dict) and step in data
        if known or (isinstance(data, list) and isinstance(step, int) and step < len(data)):
            found.append(step)
            data = data[step]
    return tuple(found)


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


def incomplete(message: str) -> PydanticCustomError:
    """Return what a validator raises where something is missing that another mapping may bring."""
    return PydanticCustomError("incomplete", message)  # type: ignore[arg-type] # it wants a literal


def key_of_union(error: ErrorDetails) -> str:
    """Return the key that tells the members of a union apart."""
    return str(error["ctx"]["discriminator"]).strip("'")


def _is_incomplete(error: ErrorDetails) -> bool:
    """Whether an error may go when mappings are merged; lists are replaced, never merged."""
    kinds = ("missing", "union_tag_not_found", "incomplete")
    return error["type"] in kinds and not any(isinstance(step, int) for step in error["loc"])


def _keys(model: Any, loc: Place) -> set[str]:
    """Return the keys that a model knows at a place."""
    for step in loc:
        inner = [
            one.model_fields[step].annotation for one in _models(model) if step in one.model_fields
        ]
        model = reduce(or_, inner) if inner else model
    return {name for one in _models(model) for name in one.model_fields}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _expected(error: ErrorDetails) -> str:
    """Return what a model wants, in its own words."""
    text = error["msg"]
    for beginning in ("Input should be ", "Input should ", "Value error, "):
        text = text.removeprefix(beginning)
    return text[:1].lower() + text[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
