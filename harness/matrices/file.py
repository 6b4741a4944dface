# SPDX-License-Identifier: Apache-2.0
"""A matrix file as it is written, but for the settings, which each kind of cell describes itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from harness.kinds import KINDS
from harness.prompts.parts import PromptPart
from harness.strict_yaml import StrictModel

AxisName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
ValueName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.]*$")]
Patch = dict[str, Any]
"""Settings, or some of them."""
Where = Annotated[
    dict[str, str | Annotated[list[str], Field(min_length=1)]],
    Field(
        min_length=1,
        description="Axis to value, or to a list of values any of which matches.",
    ),
]


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"no kind is called {kind!r}; known: {', '.join(KINDS)}")
    return kind


class Estimate(StrictModel):
    """For `list` and for the first progress lines."""

    engine_start_s: Annotated[float, Field(gt=0)]
    cell_s: Annotated[float, Field(gt=0)]
    memory_bytes: Annotated[int, Field(gt=0)]


class Include(StrictModel):
    """A cell beside the product: a value name for every axis, and the settings that differ."""

    axes: dict[str, ValueName]
    set: Patch = {}


class Override(StrictModel):
    """Settings of the cells that match."""

    where: Where
    set: Patch


class WrittenMatrix(StrictModel):
    """One question, its axes, and what every cell runs.

    A cell is `base`, then the patch of its value on each axis in the order of the axes, then each
    override that matches; mappings merge, everything else is replaced.
    """

    schema_version: Literal[1]
    kind: Annotated[
        str,
        AfterValidator(_known),
        Field(
            description="What runs the cells. "
            + " ".join(f"{kind.name}: {kind.summary}." for kind in KINDS.values()),
            json_schema_extra={"enum": list(KINDS)},
        ),
    ]
    question: Annotated[
        str, Field(min_length=1, description="The one question that the matrix answers.")
    ]
    estimate: Estimate | None = None
    prompts: Annotated[
        dict[str, Annotated[list[PromptPart], Field(min_length=1)]],
        Field(description="Prompts by name; each is a list of parts, joined as token ids."),
    ] = {}
    base: Patch
    axes: Annotated[
        dict[AxisName, Annotated[dict[ValueName, Patch], Field(min_length=1)]],
        Field(
            min_length=1,
            description="Axis to value to patch; the value's name becomes part of the cell's id.",
        ),
    ]
    exclude: Annotated[list[Where], Field(description="Combinations that are not cells.")] = []
    include: list[Include] = []
    overrides: list[Override] = []
