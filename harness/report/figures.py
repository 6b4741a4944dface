# SPDX-License-Identifier: Apache-2.0
"""Figures side by side that are read across cells: times, speeds, what bounds them, and soaks.

Parity is read cell by cell, speed across cells, so a report gives it a table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from harness.evidence.record import Record
from harness.judging.numbers import number
from harness.kinds import KINDS, METRICS
from harness.kinds.kind import Table
from harness.records.explain import kind_of


def figure_table(found: Sequence[Record[Any]]) -> Table | None:
    """Return every measured figure by cell, None where there is none."""
    measured = {
        record.cell: {finding.metric: finding.observed for finding in record.verdict.findings}
        for record in found
        if record.verdict
        and record.verdict.findings
        and (
            ((kind := kind_of(record)) is not None and kind.across_cells)
            or all(finding.budget is None for finding in record.verdict.findings)
        )
    }
    metrics = [name for name in METRICS if any(name in figures for figures in measured.values())]
    if not metrics:
        return None
    rows = [
        [cell, *(number(figures.get(name)) for name in metrics)]
        for cell, figures in measured.items()
    ]
    return Table("Figures without a budget", ["cell", *map(_with_unit, metrics)], rows)


def run_tables(found: Sequence[Record[Any]]) -> list[Table]:
    """Return the tables that kinds make of the run as a whole."""
    return [
        table
        for kind in KINDS.values()
        for table in kind.run_tables([record for record in found if kind_of(record) is kind])
    ]


def tables_side_by_side(found: Sequence[Record[Any]]) -> list[Table]:
    """Return what a report shows of a run as a whole: the kinds' tables, then every figure by cell."""
    figures = figure_table(found)
    return [*run_tables(found), *([figures] if figures else [])]


def markdown_tables(found: Sequence[Record[Any]]) -> list[str]:
    """Return the lines of all tables that a summary shows, those of single cells folded."""
    lines: list[str] = []
    for table in tables_side_by_side(found):
        lines += ["", *markdown_table(table.heads, table.rows, table.texts)]
    for record in found:
        kind = kind_of(record)
        for table in kind.tables(record) if kind else ():
            if table.in_summary:
                title = table.title[0].lower() + table.title[1:]
                summary = f"<details><summary>{record.cell}: {title}</summary>"
                lines += [
                    "",
                    summary,
                    "",
                    *markdown_table(table.heads, table.rows, table.texts),
                    "",
                    "</details>",
                ]
    return lines


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1
) -> list[str]:
    """Return a table's lines in GitHub's Markdown.

    Args:
        texts: columns from the left that hold text; figures stand on the right of theirs.
    """
    # A kernel's name may hold a bar, which would end its cell.
    shown = [[text.replace("|", "\\|") for text in row] for row in rows]
    columns = ["left"] * texts + ["right"] * (len(heads) - texts)
    table = tabulate(shown, heads, tablefmt="pipe", colalign=columns, disable_numparse=True)
    return table.splitlines()


def _with_unit(metric: str) -> str:
    """Return a metric's name, with its unit where the name does not end in it."""
    name, unit = metric.replace("_", " "), METRICS[metric].unit
    for ending in (" ms", " tok s", " gib", " tb s", " s"):
        name = name.removesuffix(ending)
    return f"{name}, {unit}" if unit else name
