# SPDX-License-Identifier: Apache-2.0
"""A matrix file becomes cells: validated, expanded, grouped by engine.

A cell's settings are `base`, patched by its value on each axis in the order of the axes, then by
every override that matches. Its id joins the value names. Cells with one checkpoint and one set of
engine arguments form a group and share one engine process. What the settings are is the kind's to say
(`harness/kinds/*/settings.py`); names that refer to each other are checked here, all faults at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.files import digest
from harness.kinds import KINDS
from harness.kinds.kind import Kind
from harness.kinds.settings import CellSettings
from harness.matrices.file import Estimate, Patch, WrittenMatrix
from harness.prompts.parts import PromptPart
from harness.strict_yaml import Document, Fault, Place, YamlError, inside, key_of_union, load

MATRICES = Path(__file__).resolve().parents[2] / "matrices"

_ENGINE_KEYS = ("checkpoint", "engine")


@dataclass(frozen=True)
class Cell:
    """One combination: its id, its value on each axis, and everything that it runs with.

    Attributes:
        settings: as its kind reads them.
        written: the same as the matrix has them, which its record keeps.
        group: the name of its engine group.
        sha256: of kind, settings and prompts.
    """

    id: str
    axes: dict[str, str]
    settings: CellSettings
    written: dict[str, Any]
    group: str
    sha256: str


@dataclass(frozen=True)
class Matrix:
    """A validated matrix file."""

    path: Path
    name: str
    kind: Kind[Any, Any]
    question: str
    estimate: Estimate | None
    prompts: dict[str, list[PromptPart]]
    cells: tuple[Cell, ...]


def load_matrix(path: Path) -> Matrix:
    """Read, validate and expand a matrix file.

    Raises:
        YamlError: with every fault of the file as `file:line: fault`.
    """
    document = load(path)
    file, kind = _read(document)
    if faults := list(_name_faults(document, file)):
        raise YamlError(path, faults)
    return Matrix(
        path=path,
        name=path.stem,
        kind=kind,
        question=file.question.strip(),
        estimate=file.estimate,
        prompts=file.prompts,
        cells=tuple(_expand(document, file, kind)),
    )


def merge(settings: Patch, patch: Patch) -> Patch:
    """Return settings with a patch laid over: mappings merge, everything else is replaced."""
    merged = dict(settings)
    for key, value in patch.items():
        below = merged.get(key)
        merged[key] = (
            merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
        )
    return merged


def _read(document: Document) -> tuple[WrittenMatrix, Kind[Any, Any]]:
    """Return the file and its kind, once the file and each of its patches are sound."""
    faults: list[Fault] = []
    file = None
    try:
        file = WrittenMatrix.model_validate(document.data)
    except ValidationError as error:
        faults += document.faults(error, (), WrittenMatrix)
    data = document.data if isinstance(document.data, dict) else {}
    kind = KINDS.get(str(data.get("kind")))
    if kind is not None:
        for place in _patches(data):
            faults += _patch_faults(document, place, kind.settings)
    if faults or file is None or kind is None:
        raise YamlError(document.path, faults)
    return file, kind


def _patches(data: dict[str, Any]) -> Iterator[Place]:
    """Yield the places of settings, as far as the file has the form of a matrix."""
    found: dict[Place, Any] = {("base",): data.get("base")}
    for axis, values in _items(data.get("axes")):
        found |= {("axes", axis, name): patch for name, patch in _items(values)}
    for section in ("include", "overrides"):
        for index, entry in enumerate(data.get(section) or ()):
            found |= {(section, index, "set"): dict(_items(entry)).get("set")}
    yield from (place for place, patch in found.items() if isinstance(patch, dict))


def _items(node: Any) -> list[tuple[str, Any]]:
    return list(node.items()) if isinstance(node, dict) else []


def _patch_faults(document: Document, place: Place, model: type[CellSettings]) -> Iterator[Fault]:
    """Yield what is wrong with some settings, whatever else a cell will have."""
    try:
        model.model_validate(document.at(place))
    except ValidationError as error:
        yield from document.faults(error, place, model, partial=True)


def _name_faults(document: Document, file: WrittenMatrix) -> Iterator[Fault]:
    """Yield axes, values and prompts that are named but not there."""
    axes = file.axes
    wheres: list[tuple[Place, Any]] = [
        (("exclude", index), where) for index, where in enumerate(file.exclude)
    ]
    wheres += [
        (("overrides", index, "where"), override.where)
        for index, override in enumerate(file.overrides)
    ]
    for place, where in wheres:
        for axis, values in where.items():
            line = document.line((*place, axis))
            if axis not in axes:
                yield Fault(line, f"unknown axis {axis!r}; known: {', '.join(axes)}")
                continue
            included = [entry.axes[axis] for entry in file.include if axis in entry.axes]
            known = [*axes[axis], *included]
            for value in [values] if isinstance(values, str) else values:
                if value not in known:
                    yield Fault(
                        line, f"axis {axis} has no value {value!r}; known: {', '.join(known)}"
                    )
    for index, entry in enumerate(file.include):
        if set(entry.axes) != set(axes):
            line = document.line(("include", index, "axes"))
            wanted, found = ", ".join(axes), ", ".join(entry.axes)
            yield Fault(line, f"expected a value for each of {wanted}; found {found}")
    for place, line in document.lines.items():
        if len(place) > 2 and place[-2] == "prompts" and isinstance(place[-1], int):
            name = document.at(place)
            if name not in file.prompts:
                known = list(file.prompts)
                yield Fault(line, f"no prompt is called {name!r}; known: {', '.join(known)}")


def _expand(document: Document, file: WrittenMatrix, kind: Kind[Any, Any]) -> list[Cell]:
    """Return the cells, those of one engine group together.

    Raises:
        YamlError: cells without a name of their own, or whose settings are not complete.
    """
    cells: dict[str, Cell] = {}
    names: dict[str, str] = {}
    faults: list[Fault] = []
    gaps: dict[tuple[int, str], list[str]] = {}
    for combination, extra, line in _combinations(document, file):
        written = merge(_settings(file, combination), extra)
        cell_id = "-".join(combination.values())
        if cell_id in cells:
            faults.append(Fault(line, f"two cells are called {cell_id}"))
        try:
            settings = kind.settings.model_validate(written)
        except ValidationError as error:
            for text in _gaps(error, written):
                gaps.setdefault((line, text), []).append(cell_id)
            continue
        prompts = {name: document.data["prompts"][name] for name in settings.prompt_names}
        cells[cell_id] = Cell(
            id=cell_id,
            axes=combination,
            settings=settings,
            written=written,
            group=_group_name(file, combination, written, names),
            sha256=digest({"kind": kind.name, "settings": written, "prompts": prompts}),
        )
    for (line, text), found in gaps.items():
        listed = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        faults.append(Fault(line, f"{text} in {listed}"))
    if not cells and not faults:
        line = document.line(("exclude",))
        faults.append(Fault(line, "no cell is left: the excludes remove all"))
    if faults:
        raise YamlError(document.path, faults)
    order = list(names.values())
    return sorted(cells.values(), key=lambda cell: order.index(cell.group))


def _combinations(
    document: Document, file: WrittenMatrix
) -> Iterator[tuple[dict[str, str], Patch, int]]:
    """Yield value by axis, settings beside the axes' patches, and line of each cell."""
    for values in itertools.product(*file.axes.values()):
        combination = dict(zip(file.axes, values, strict=True))
        if not any(_matches(where, combination) for where in file.exclude):
            yield combination, {}, document.line(("axes",))
    for index, entry in enumerate(file.include):
        ordered = {axis: entry.axes[axis] for axis in file.axes}
        yield ordered, entry.set, document.line(("include", index))


def _settings(file: WrittenMatrix, combination: Mapping[str, str]) -> Patch:
    """Return base, patched by each axis and by the overrides that match."""
    settings = file.base
    for axis, value in combination.items():
        settings = merge(settings, file.axes[axis].get(value, {}))
    for override in file.overrides:
        if _matches(override.where, combination):
            settings = merge(settings, override.set)
    return settings


def _matches(where: Mapping[str, str | list[str]], combination: Mapping[str, str]) -> bool:
    return all(
        combination[axis] == values if isinstance(values, str) else combination[axis] in values
        for axis, values in where.items()
    )


def _gaps(error: ValidationError, written: Patch) -> Iterator[str]:
    """Yield what a cell lacks once everything is merged; all else was told of the patches."""
    for one in error.errors(include_url=False):
        place = [str(step) for step in inside(one["loc"], written)]
        if one["type"] in ("missing", "union_tag_not_found"):
            key = str(one["loc"][-1]) if one["type"] == "missing" else key_of_union(one)
            yield f"`{'.'.join([*place, key])}` is missing"
        elif one["type"] == "incomplete":
            yield one["msg"]
        else:
            message = str(one["ctx"]["error"]) if one["type"] == "value_error" else one["msg"]
            yield ": ".join(filter(None, [".".join(place), message]))


def _group_name(
    file: WrittenMatrix, combination: Mapping[str, str], written: Patch, names: dict[str, str]
) -> str:
    """Return the axis values that matter to the engine, made unique by a hash where they are not.

    Args:
        names: by hash of the engine configuration; added to.
    """
    key = digest({name: written.get(name) for name in _ENGINE_KEYS})
    if key not in names:
        parts = [
            value
            for axis, value in combination.items()
            if not file.axes[axis].get(value, {"engine": {}}).keys().isdisjoint(_ENGINE_KEYS)
        ]
        name = "-".join(parts) or file.kind
        names[key] = name if name not in names.values() else f"{name}-{key[:6]}"
    return names[key]
