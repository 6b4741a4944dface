# SPDX-License-Identifier: Apache-2.0
"""A matrix file becomes cells: validated, expanded, filtered, grouped by engine.

A cell's settings are `base`, patched by its value on each axis in the order of the axes, then by
every override that matches. Its id joins the value names. Cells with one checkpoint and one set of
engine arguments form a group and share one engine process. The keys are in `matrices/schema.json`;
what a schema cannot say (names that refer to each other, settings that a kind of cell needs) is
checked here, all faults at once.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.strict_yaml import Document, Fault, MatrixError, Place, load

SCHEMA_PATH = Path(__file__).resolve().parents[1] / "matrices" / "schema.json"

# Every key that a cell of a kind must have in the end, so that nothing has a silent default.
_REQUIRED = {
    "parity": {
        "checkpoint": ("shape", "dtype", "seed", "taught", "quantize"),
        "precision": (),
        "engine": ("args", "env"),
        "sampling": ("max_tokens", "temperature", "ignore_eos", "logprobs"),
        "workload": ("rounds",),
        "reach": (
            "mamba_ssm_cache_dtype",
            "mamba_cache_mode",
            "prefill",
            "preemptions",
            "cudagraphs",
            "quantization",
        ),
        "timeout": ("start_s", "cell_s"),
    },
    "parser": {
        "checkpoint": ("shape", "dtype", "seed", "taught", "quantize"),
        "parser": ("delta_size", "history", "mode", "tool_choice", "truncation"),
        "timeout": ("start_s", "cell_s"),
    },
    "smoke": {
        "engine": ("args", "env", "serve"),
        "smoke": ("check",),
        "timeout": ("start_s", "cell_s"),
    },
    "speed": {
        "checkpoint": ("shape", "dtype", "seed"),
        "engine": ("args", "env"),
        "speed": (
            "phase",
            "streams",
            "prompt_tokens",
            "max_tokens",
            "rounds",
            "seed",
            "profile",
        ),
        "timeout": ("start_s", "cell_s"),
    },
    "soak": {
        "checkpoint": ("shape", "dtype", "seed", "taught", "quantize"),
        "engine": ("args", "env"),
        "soak": (
            "seed",
            "duration_s",
            "concurrency",
            "pause_s",
            "distinct",
            "max_tokens",
            "streamed",
            "mix",
            "sample_s",
            "at_least",
            "limits",
        ),
        "timeout": ("start_s", "cell_s"),
    },
}
# What a smoke cell's check needs beside.
_CHECK_KEYS = {
    "parity": (),
    "generation": ("max_tokens",),
    "timing": ("streams", "prompt_tokens", "max_tokens", "rounds", "seed"),
}
_ENGINE_KEYS = ("checkpoint", "engine")

Settings = dict[str, Any]


class SelectionError(ValueError):
    """A filter names an axis, a value or a cell that the matrix does not have."""


@dataclass(frozen=True)
class Cell:
    """One combination: its id, its value on each axis, and everything that it runs with."""

    id: str
    axes: dict[str, str]
    settings: Settings
    group: str
    sha256: str


@dataclass(frozen=True)
class Estimate:
    """Expected cost, for `list` and the first progress lines."""

    engine_start_s: float
    cell_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Matrix:
    """A validated matrix file."""

    path: Path
    name: str
    kind: str
    question: str
    estimate: Estimate | None
    prompts: dict[str, list[dict[str, Any]]]
    cells: tuple[Cell, ...]


def load_matrix(path: Path) -> Matrix:
    """Read, validate and expand a matrix file.

    Raises:
        MatrixError: with every fault of the file as `file:line: fault`.
    """
    document = load(path, json.loads(SCHEMA_PATH.read_text(encoding="utf-8")))
    data = document.data
    faults = list(_name_faults(document))
    if not faults:
        cells = _expand(document, faults)
    if faults:
        raise MatrixError(path, faults)
    return Matrix(
        path=path,
        name=path.stem,
        kind=data["kind"],
        question=data["question"].strip(),
        estimate=Estimate(**data["estimate"]) if "estimate" in data else None,
        prompts=data.get("prompts", {}),
        cells=tuple(cells),
    )


def select(matrix: Matrix, globs: Iterable[str], axes: Iterable[str]) -> list[Cell]:
    """The cells that match any glob (all when there is none) and every `axis=value`.

    Several values of one axis are alternatives.

    Raises:
        SelectionError: naming what is unknown and what is known, or that the filters leave nothing.
    """
    globs = list(globs)
    wanted: dict[str, set[str]] = {}
    for text in axes:
        axis, equals, value = text.partition("=")
        values = {cell.axes.get(axis) for cell in matrix.cells} - {None}
        if not equals or not values:
            known = ", ".join(matrix.cells[0].axes)
            raise SelectionError(f"--axis {text}: expected AXIS=VALUE with an axis out of {known}")
        if value not in values:
            known = ", ".join(sorted(str(name) for name in values))
            raise SelectionError(f"--axis {text}: {axis} has no value {value!r}; known: {known}")
        wanted.setdefault(axis, set()).add(value)
    for glob in globs:
        if not any(fnmatch.fnmatchcase(cell.id, glob) for cell in matrix.cells):
            raise SelectionError(
                f"--cell {glob}: no cell of {matrix.name} matches; see `--collect-only`"
            )
    chosen = [
        cell
        for cell in matrix.cells
        if (not globs or any(fnmatch.fnmatchcase(cell.id, glob) for glob in globs))
        and all(cell.axes[axis] in values for axis, values in wanted.items())
    ]
    if not chosen:
        raise SelectionError(f"the filters leave no cell of {matrix.name}")
    return chosen


def groups(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells by engine group, both in the order of the matrix."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.group, []).append(cell)
    return found


def digest(value: object) -> str:
    """SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def merge(settings: Settings, patch: Settings) -> Settings:
    """Settings with a patch laid over: mappings merge, everything else is replaced."""
    merged = dict(settings)
    for key, value in patch.items():
        below = merged.get(key)
        merged[key] = (
            merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
        )
    return merged


def prompt_names(settings: Settings) -> list[str]:
    """The prompts that a cell's workload uses."""
    rounds = settings.get("workload", {}).get("rounds", [])
    return sorted({name for round_ in rounds for name in round_["prompts"]})


def _name_faults(document: Document) -> Iterator[Fault]:
    """Axes, values and prompts that are named but not there."""
    data = document.data
    axes: Mapping[str, Any] = data["axes"]
    wheres: list[tuple[Place, Any]] = [
        (("exclude", i), where) for i, where in enumerate(data.get("exclude", []))
    ]
    wheres += [
        (("overrides", i, "where"), override["where"])
        for i, override in enumerate(data.get("overrides", []))
    ]
    included = [entry["axes"] for entry in data.get("include", [])]
    for place, where in wheres:
        for axis, values in where.items():
            line = document.line((*place, axis))
            if axis not in axes:
                yield Fault(line, f"unknown axis {axis!r}; known: {', '.join(axes)}")
                continue
            known = [*axes[axis], *(entry[axis] for entry in included if axis in entry)]
            for value in [values] if isinstance(values, str) else values:
                if value not in known:
                    yield Fault(
                        line, f"axis {axis} has no value {value!r}; known: {', '.join(known)}"
                    )
    for index, entry in enumerate(included):
        if set(entry) != set(axes):
            line = document.line(("include", index, "axes"))
            yield Fault(
                line, f"expected a value for each of {', '.join(axes)}; found {', '.join(entry)}"
            )
    prompts = data.get("prompts", {})
    for place, line in document.lines.items():
        if len(place) > 2 and place[-2] == "prompts" and isinstance(place[-1], int):
            name = _at(data, place)
            if name not in prompts:
                yield Fault(line, f"no prompt is called {name!r}; known: {', '.join(prompts)}")


def _at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


def _expand(document: Document, faults: list[Fault]) -> list[Cell]:
    data = document.data
    cells: dict[str, Cell] = {}
    names: dict[str, str] = {}
    gaps: dict[tuple[int, str], list[str]] = {}
    for combination, extra, line in _combinations(document):
        settings = merge(_settings(data, combination), extra)
        cell_id = "-".join(combination.values())
        if cell_id in cells:
            faults.append(Fault(line, f"two cells are called {cell_id}"))
        for text in _gaps(data["kind"], settings):
            gaps.setdefault((line, text), []).append(cell_id)
        prompts = {name: data["prompts"][name] for name in prompt_names(settings)}
        cells[cell_id] = Cell(
            id=cell_id,
            axes=combination,
            settings=settings,
            group=_group_name(data, combination, settings, names),
            sha256=digest({"kind": data["kind"], "settings": settings, "prompts": prompts}),
        )
    for (line, text), found in gaps.items():
        listed = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        faults.append(Fault(line, f"{text} in {listed}"))
    if not cells:
        line = document.line(("exclude",))
        faults.append(Fault(line, "no cell is left: the excludes remove all"))
    order = list(names.values())
    return sorted(cells.values(), key=lambda cell: order.index(cell.group))


def _combinations(document: Document) -> Iterator[tuple[dict[str, str], Settings, int]]:
    """Value by axis, settings beside the axes' patches, and line of each cell."""
    data = document.data
    for values in itertools.product(*data["axes"].values()):
        combination = dict(zip(data["axes"], values, strict=True))
        if not any(_matches(where, combination) for where in data.get("exclude", [])):
            yield combination, {}, document.line(("axes",))
    for index, entry in enumerate(data.get("include", [])):
        ordered = {axis: entry["axes"][axis] for axis in data["axes"]}
        yield ordered, entry.get("set", {}), document.line(("include", index))


def _settings(data: Any, combination: Mapping[str, str]) -> Settings:
    """Base, patched by each axis and by the overrides that match."""
    settings: Settings = data["base"]
    for axis, value in combination.items():
        settings = merge(settings, data["axes"][axis].get(value, {}))
    for override in data.get("overrides", []):
        if _matches(override["where"], combination):
            settings = merge(settings, override["set"])
    return settings


def _matches(where: Mapping[str, str | list[str]], combination: Mapping[str, str]) -> bool:
    return all(
        combination[axis] == values if isinstance(values, str) else combination[axis] in values
        for axis, values in where.items()
    )


def _gaps(kind: str, settings: Settings) -> Iterator[str]:
    for key, inner in _REQUIRED[kind].items():
        if key not in settings:
            yield f"`{key}` is missing"
            continue
        for name in inner:
            if name not in settings[key]:
                yield f"`{key}.{name}` is missing"
    if kind == "soak" and "max_model_len" not in settings.get("engine", {}).get("args", {}):
        yield "`engine.args.max_model_len` is missing"
    smoke = settings.get("smoke", {})
    for name in _CHECK_KEYS.get(smoke.get("check"), ()):
        if name not in smoke:
            yield f"`smoke.{name}` is missing"
    if smoke.get("check") in ("parity", "generation") and "workload" not in settings:
        yield "`workload` is missing"
    for round_ in settings.get("workload", {}).get("rounds", []):
        if (round_["schedule"] == "arrivals") != ("arrive_every_steps" in round_):
            yield "`arrive_every_steps` belongs to schedule `arrivals`, and only there"


def _group_name(
    data: Any, combination: Mapping[str, str], settings: Settings, names: dict[str, str]
) -> str:
    """The axis values that matter to the engine, made unique by a hash where they are not.

    Args:
        names: by hash of the engine configuration; added to.
    """
    key = digest({name: settings.get(name) for name in _ENGINE_KEYS})
    if key not in names:
        parts = [
            value
            for axis, value in combination.items()
            if not data["axes"][axis].get(value, {"engine": {}}).keys().isdisjoint(_ENGINE_KEYS)
        ]
        name = "-".join(parts) or data["kind"]
        names[key] = name if name not in names.values() else f"{name}-{key[:6]}"
    return names[key]
