# SPDX-License-Identifier: Apache-2.0
"""`python -m harness compare A B`: which cells got better or worse, appeared or vanished.

A and B are run folders or baseline files. Only the same measurement is compared: cell settings,
prompts and checkpoint must be equal, or nothing is said but what differs. Each metric knows its
better direction (`kinds.METRICS`); times are compared on one kind of card only, between runs that
had it to themselves. Against a baseline an improvement is reported as loudly as a loss, because a
stale baseline lets the next loss pass: renew it on purpose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from harness import exit_codes
from harness.judging.numbers import number
from harness.kinds import METRICS
from harness.records.explain import text_table
from harness.records.store import RecordError, load_run
from harness.records.summary import CellSummary, RunSummary, summarise_run

_IDENTITY = ("cell_sha256", "corpus_sha256", "checkpoint_sha256")


class UnlikeError(ValueError):
    """Two runs did not measure the same; the message names each cell and what differs."""


@dataclass(frozen=True)
class Move:
    """A figure of a cell that got better or worse."""

    cell: str
    metric: str
    before: float | str
    after: float | str
    direction: Literal["better", "worse"]


@dataclass(frozen=True)
class Comparison:
    """Everything that is different in B."""

    moves: list[Move]
    appeared: list[str]
    vanished: list[str]
    common: int

    @property
    def better(self) -> list[Move]:
        """Moves in the good direction."""
        return [move for move in self.moves if move.direction == "better"]

    @property
    def worse(self) -> list[Move]:
        """Moves in the bad direction."""
        return [move for move in self.moves if move.direction == "worse"]


def compare(before: RunSummary, after: RunSummary) -> Comparison:
    """Join two runs by cell.

    Raises:
        UnlikeError: when the matrices differ, or a cell of both has other settings, prompts or
        checkpoint.
    """
    if before.matrix != after.matrix:
        raise UnlikeError(f"A is a run of {before.matrix}, B of {after.matrix}")
    common = [cell for cell in after.cells if cell in before.cells]
    faults = [
        fault for cell in common for fault in _unlike(cell, before.cells[cell], after.cells[cell])
    ]
    if faults:
        raise UnlikeError("\n".join(faults))
    # Two runs of the same code differ in a third of their times on a CPU, and in most where engines
    # share a card.
    timed = (
        after.card != "cpu"
        and before.processes == after.processes == 1
        and (before.card, before.processor) == (after.card, after.processor)
    )
    moves = [
        move
        for cell in common
        for move in _moves(cell, before.cells[cell], after.cells[cell], timed)
    ]
    return Comparison(
        moves=moves,
        appeared=[cell for cell in after.cells if cell not in before.cells],
        vanished=[cell for cell in before.cells if cell not in after.cells],
        common=len(common),
    )


def load(path: Path) -> tuple[RunSummary, bool]:
    """A run folder or a baseline file, and whether it is a baseline.

    Raises:
        RecordError: when it is neither, or a record of the run is unreadable.
    """
    if path.is_dir():
        header, found, faults = load_run(path)
        if faults:
            raise RecordError("\n".join(faults))
        return summarise_run(found, header.matrix, header.started, header.environment), False
    try:
        return RunSummary.model_validate_json(path.read_text(encoding="utf-8")), True
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise RecordError(f"{path}: not a baseline: {error}") from error


def describe(comparison: Comparison) -> str:
    """The comparison as text."""
    rows: list[tuple[str, ...]] = []
    for move in comparison.moves:
        figures = [
            value if isinstance(value, str) else number(value)
            for value in (move.before, move.after)
        ]
        rows.append((move.cell, move.metric, *figures, move.direction))
    parts = [f"{comparison.common} cells in both: {_counts(comparison)}"]
    if comparison.moves:
        parts.append(text_table(("cell", "metric", "A", "B", ""), rows))
    for name, cells in (("appeared", comparison.appeared), ("vanished", comparison.vanished)):
        if cells:
            parts.append(f"{name}: {', '.join(cells)}")
    return "\n\n".join(parts)


def _counts(comparison: Comparison) -> str:
    better = len({move.cell for move in comparison.better})
    worse = len({move.cell for move in comparison.worse})
    return f"{worse} worse, {better} better" if better or worse else "none moved"


def _unlike(cell: str, before: CellSummary, after: CellSummary) -> Iterator[str]:
    for field in _IDENTITY:
        values = getattr(before, field), getattr(after, field)
        # A cell that failed early has no corpus or checkpoint: its verdict still compares.
        if None not in values and values[0] != values[1]:
            yield f"{cell}: {field.removesuffix('_sha256')} differs; it is not the same measurement"


def _moves(cell: str, before: CellSummary, after: CellSummary, timed: bool) -> Iterator[Move]:
    if (before.verdict == "pass") != (after.verdict == "pass"):
        direction: Literal["better", "worse"] = "better" if after.verdict == "pass" else "worse"
        yield Move(cell, "verdict", before.verdict, after.verdict, direction)
    for name, metric in METRICS.items():
        if name not in before.figures or name not in after.figures or metric.better == "none":
            continue
        if metric.of_machine and not timed:
            continue
        old, new = before.figures[name], after.figures[name]
        low, high = sorted((abs(old), abs(new)))
        if abs(new - old) > metric.negligible and high > low * metric.moved_ratio:
            good = (new < old) == (metric.better == "lower")
            yield Move(cell, name, old, new, "better" if good else "worse")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness compare`."""
    parser.add_argument("before", type=Path, metavar="A", help="a run folder or a baseline file")
    parser.add_argument("after", type=Path, metavar="B", help="a run folder or a baseline file")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 when a cell got worse, or moved at all against a baseline."""
    try:
        before, is_baseline = load(args.before)
        after, _ = load(args.after)
        comparison = compare(before, after)
    except (RecordError, UnlikeError) as error:
        print(error, file=sys.stderr)
        return exit_codes.USAGE
    print(describe(comparison))
    if comparison.common == 0:
        print("no cell is in both: nothing was compared", file=sys.stderr)
        return exit_codes.NOT_REACHED
    if is_baseline and comparison.better:
        print(
            "\nbetter than the baseline: renew it with "
            f"`python -m harness baseline {args.after} --renew`"
        )
    moved = comparison.worse or (is_baseline and comparison.better)
    return exit_codes.FAILED if moved else exit_codes.PASSED
