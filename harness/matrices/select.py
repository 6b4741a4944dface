# SPDX-License-Identifier: Apache-2.0
"""Which cells of a matrix are meant, and which of them share an engine."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from harness.matrices.expand import Cell, Matrix


class SelectionError(ValueError):
    """A filter names an axis, a value or a cell that the matrix does not have."""


def select(matrix: Matrix, globs: Iterable[str], axes: Iterable[str]) -> list[Cell]:
    """Return the cells that match any glob (all when there is none) and every `axis=value`.

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
    """Return cells by engine group, both in the order of the matrix."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.group, []).append(cell)
    return found
