# SPDX-License-Identifier: Apache-2.0
"""How far a run is: cells done, the engine at work, and the time that is left.

Time left is what is known so far: the mean of finished cells and of engine starts, or the matrix's
own estimate until there is one. Processes that share the work divide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.judging.numbers import duration
from harness.matrices.file import Estimate

_START_S, _CELL_S = 30.0, 10.0  # where a matrix has no estimate


class Progress:
    """Counts the cells of a session.

    Args:
        cells: (engine group, cell) of everything selected.
        estimate: of the matrix.
        processes: pytest processes that share the cells.
    """

    def __init__(
        self, cells: Sequence[tuple[str, str]], estimate: Estimate | None = None, processes: int = 1
    ):
        self._waiting = list(cells)
        self._total = len(cells)
        self._started = 0
        self._usual_start_s = estimate.engine_start_s if estimate else _START_S
        self._usual_cell_s = estimate.cell_s if estimate else _CELL_S
        self._processes = processes
        self._cell_s: list[float] = []
        self._start_s: list[float] = []
        self._groups_seen: set[str] = set()

    def start(self, group: str, cell: str) -> str:
        """The line to show when a cell begins."""
        self._started += 1
        width = len(str(self._total))
        place = f"[{self._started:>{width}}/{self._total}]"
        engine = group if group in self._groups_seen else f"{group}, starting"
        left = duration(self.left_s())
        self._groups_seen.add(group)
        return f"{place} {cell} · engine {engine} · about {left} left"

    def finish(self, group: str, cell: str, cell_s: float, engine_start_s: float | None) -> None:
        """Take note of a finished cell and, where it started one, of its engine's start."""
        if (group, cell) in self._waiting:
            self._waiting.remove((group, cell))
        self._cell_s.append(cell_s)
        if engine_start_s is not None:
            self._start_s.append(engine_start_s)

    def left_s(self) -> float:
        """Seconds until the last cell should be done."""
        starts = len({group for group, _ in self._waiting} - self._groups_seen)
        cell_s = _mean(self._cell_s, self._usual_cell_s)
        start_s = _mean(self._start_s, self._usual_start_s)
        return (len(self._waiting) * cell_s + starts * start_s) / self._processes


def _mean(values: Iterable[float], otherwise: float) -> float:
    values = list(values)
    return sum(values) / len(values) if values else otherwise
