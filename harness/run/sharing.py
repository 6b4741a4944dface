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
from harness.matrices.expand import Cell, Matrix
from harness.matrices.file import Estimate

_CORES_OF_AN_ENGINE = (
    1.2  # on a card: one that starts keeps a core busy, and waits while its reference child does
)
# Below: one H200, ten engines at once on 16 cores, nothing cached.
_COMPILED_START = 1.5  # over an eager one: 195 s and 126 s
_REFERENCE_TOKEN_S = 0.005  # the reference's pass, on one core; 3.5 ms on one that is free
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
        f"{cores} cores": int(cores / _CORES_OF_AN_ENGINE) if on_card else cores,
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
    large = [name for name in others if _checkpoint(groups[name]).get("shape") in _LARGE]
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
    """What a group should take: its engine's start, its cells, the reference over its prompts."""
    usual = matrix.estimate or _USUAL
    args = cells[0].written.get("engine", {}).get("args", {})
    compiled = args.get("enforce_eager") is False
    prompts = {name for cell in cells for name in cell.settings.prompt_names}
    lengths = [
        part.random.length
        for name in prompts
        for part in matrix.prompts[name]
        if part.random is not None
    ]
    tokens = sum(length for length in lengths if isinstance(length, int))
    return (
        usual.engine_start_s * (_COMPILED_START if compiled else 1.0)
        + usual.cell_s * len(cells)
        + _REFERENCE_TOKEN_S * tokens
    )


def _checkpoint(cells: Sequence[Cell]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = cells[0].written.get("checkpoint", {})
    return found
