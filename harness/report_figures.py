# SPDX-License-Identifier: Apache-2.0
"""Figures side by side that are read across cells: times, speeds, what bounds them, and soaks.

Parity is read cell by cell, speed across cells, so a report gives it a table of its own, and each
profiled cell a table of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.explain import number
from harness.measurements import SoakObservation, SpeedObservation
from harness.metrics import METRICS
from harness.records import Record

Table = tuple[list[str], list[list[str]]]
"""The heads, the first of which names the row, and the rows."""


def figure_table(found: Sequence[Record]) -> Table | None:
    """Return every measured figure by cell, None where there is none."""
    measured = {
        record.cell: {f.metric: f.observed for f in record.verdict.findings}
        for record in found
        if record.verdict
        and record.verdict.findings
        and (
            isinstance(record.observation, SoakObservation)
            or all(finding.budget is None for finding in record.verdict.findings)
        )
    }
    metrics = [name for name in METRICS if any(name in figures for figures in measured.values())]
    if not metrics:
        return None
    heads = ["cell", *map(_with_unit, metrics)]
    return heads, [
        [cell, *(number(figures.get(name)) for name in metrics)]
        for cell, figures in measured.items()
    ]


def kernel_table(record: Record) -> Table | None:
    """Return what a decode step of a profiled cell runs, longest first."""
    observation = record.observation
    if not isinstance(observation, SpeedObservation) or not observation.kernels:
        return None
    return ["kernel", "calls a step", "µs a step"], [
        [kernel.name, number(kernel.calls), number(kernel.total_us)]
        for kernel in observation.kernels
    ]


def markdown_tables(found: Sequence[Record]) -> list[str]:
    """Return the lines of all tables, those of kernels folded."""
    lines: list[str] = []
    figures = figure_table(found)
    if figures is not None:
        lines += ["", *_markdown(figures)]
    for record in found:
        kernels = kernel_table(record)
        if kernels is not None:
            title = f"<details><summary>{record.cell}: kernels of a decode step</summary>"
            lines += ["", title, "", *_markdown(kernels), "", "</details>"]
    return lines


def _markdown(table: Table) -> list[str]:
    heads, rows = table
    marks = ["---", *["---:"] * (len(heads) - 1)]
    # A kernel's name may hold a bar, which would end its cell.
    shown = [[text.replace("|", "\\|") for text in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heads, marks, *shown)]


def _with_unit(metric: str) -> str:
    """Return a metric's name, with its unit where the name does not end in it."""
    name, unit = metric.replace("_", " "), METRICS[metric].unit
    for ending in (" ms", " tok s", " gib", " tb s", " s"):
        name = name.removesuffix(ending)
    return f"{name}, {unit}" if unit else name
