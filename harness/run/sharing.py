# SPDX-License-Identifier: Apache-2.0
"""How processes share a run: how many there are, and which engine group is taken first.

`pytest -n auto` asks here. Engines of one card share its memory; what a start costs is compiling
on the host, so cores bound them too. The longest group goes first, so that none is left to one
process at the end; of those that need the taught checkpoint one goes first and the others follow
when it should be there, so that no process waits for what another one teaches. Engines of the
published shapes are ten times as large as the others: they come in pairs, a round of the processes
apart, so that few of them stand on the card at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import psutil

from harness import machine
from harness.checkpoints.shapes import SHAPES
from harness.judging.tolerance import precision
from harness.matrices.expand import Cell, Matrix
from harness.matrices.file import Estimate

# Measured on one H200, 13 engines at once on 16 cores, nothing cached.
_COMPILED_START = 3.0  # over an eager one: 100 s and 30 s
_EAGER_CELL = 2.0  # over a captured one
_LARGE_CELL = 15.0  # over one of `tiny`
_REFERENCE_TOKEN_S = 0.004  # of one pass on one core, of a model that is 512 wide
_REFERENCES = {False: 3, True: 6}  # passes over each token, whether the precision has ties or not
_BLOCK_TOKENS = 400  # of the prefix cache, for what is given in blocks: 144 to 544
_LARGE = ("logos", "praxis")
_USUAL = Estimate(engine_start_s=30, cell_s=10, memory_bytes=3_000_000_000)


@dataclass(frozen=True)
class Share:
    """How many processes a run takes, and the figures that say so."""

    processes: int
    why: str


def share(matrices: Sequence[Matrix], groups: int) -> Share:
    """Return how many processes this machine carries for these matrices.

    Args:
        groups: engine groups that were selected; a process more than those would idle.
    """
    engine_bytes = max((matrix.estimate or _USUAL).memory_bytes for matrix in matrices)
    cores = len(os.sched_getaffinity(0))
    free_bytes = machine.cards_free_bytes()
    on_card = free_bytes is not None
    if free_bytes is None:
        free_bytes = psutil.virtual_memory().available
    limits = {
        f"{cores} cores": cores,  # each keeps one busy: its engine or its reference child
        f"{free_bytes / 1e9:.0f} GB free {'on the card' if on_card else 'in memory'} "
        f"at {engine_bytes / 1e9:.1f} an engine": free_bytes // engine_bytes,
        f"{groups} engines": groups,
    }
    processes = max(1, min(limits.values()))
    return Share(processes, ", ".join(f"{why}: {limit}" for why, limit in limits.items()))


def ordered(matrix: Matrix, groups: Mapping[str, Sequence[Cell]], processes: int) -> list[str]:
    """Return the names of engine groups in the order in which processes should take them.

    Args:
        groups: cells by group.
        processes: that share them; each holds a group that runs and one that waits for it.
    """
    names = sorted(groups, key=lambda name: -_seconds(matrix, groups[name]))
    taught = [name for name in names if _checkpoint(groups[name]).get("taught")]
    others = [name for name in names if name not in taught]
    large = [name for name in others if _is_large(groups[name])]
    small = [name for name in others if name not in large]
    at_first = 2 * processes - 1
    order = [*taught[:1], *small[:at_first], *taught[1:], *small[at_first:]]
    large.sort(key=lambda name: _LARGE.index(_checkpoint(groups[name])["shape"]))
    half = (len(large) + 1) // 2
    for number, pair in enumerate(zip_longest(large[:half], large[half:])):
        place = number * processes
        order[place:place] = [name for name in pair if name is not None]
    return order


def _seconds(matrix: Matrix, cells: Sequence[Cell]) -> float:
    """What a group should take: its engine's start, its cells, the references over its prompts."""
    usual = matrix.estimate or _USUAL
    args = cells[0].written.get("engine", {}).get("args", {})
    compiled = args.get("enforce_eager") is False
    start_s = usual.engine_start_s * (_COMPILED_START if compiled else 1.0)
    cell_s = usual.cell_s * (1.0 if compiled else _EAGER_CELL)
    if _is_large(cells):
        cell_s *= _LARGE_CELL
    return start_s + cell_s * len(cells) + _reference_seconds(matrix, cells)


def _reference_seconds(matrix: Matrix, cells: Sequence[Cell]) -> float:
    served = cells[0].written.get("precision")
    if served is None or _is_large(cells):
        return 0.0  # no reference runs
    prompts = {name for cell in cells for name in cell.settings.prompt_names}
    parts = [part.random for name in prompts for part in matrix.prompts[name]]
    lengths = [part.length for part in parts if part is not None]
    tokens = sum(
        length if isinstance(length, int) else length.blocks * _BLOCK_TOKENS + length.plus
        for length in lengths
    )
    width = SHAPES[_checkpoint(cells)["shape"]]["hidden_size"] / 512
    return _REFERENCE_TOKEN_S * width * _REFERENCES[precision(served).has_ties] * tokens


def _is_large(cells: Sequence[Cell]) -> bool:
    return _checkpoint(cells).get("shape") in _LARGE


def _checkpoint(cells: Sequence[Cell]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = cells[0].written.get("checkpoint", {})
    return found
