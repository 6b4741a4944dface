# SPDX-License-Identifier: Apache-2.0
"""The figures of a record: what comparisons, baselines and reports look at.

A summary is small and has no paths or machine names, so that it can be kept in the repository.
"""

from __future__ import annotations

from typing import Any, Literal

from harness.evidence.base import Evidence
from harness.evidence.environment import Environment
from harness.evidence.record import Record
from harness.evidence.verdict import VerdictName
from harness.records.explain import figures


class CellSummary(Evidence):
    """A cell in a few numbers."""

    verdict: VerdictName
    cell_sha256: str
    corpus_sha256: str | None
    checkpoint_sha256: str | None
    figures: dict[str, float]


class RunSummary(Evidence):
    """The cells of a run; what a baseline file holds."""

    schema_version: Literal[1] = 1
    matrix: str
    card: str
    processor: str
    processes: int | None = None
    versions: dict[str, str]
    date: str
    cells: dict[str, CellSummary]


def summarise_run(
    found: list[Record[Any]], matrix: str, date: str, environment: Environment
) -> RunSummary:
    """Summarise the records of a run."""
    return RunSummary(
        matrix=matrix,
        card=environment.card_name,
        processor=environment.machine.processor,
        processes=environment.processes,
        versions=environment.versions,
        date=date,
        cells={record.cell: summarise(record) for record in found},
    )


def summarise(record: Record[Any]) -> CellSummary:
    """Summarise one judged record."""
    return CellSummary(
        verdict=record.verdict.verdict if record.verdict else "error",
        cell_sha256=record.identity.cell_sha256,
        corpus_sha256=record.corpus.sha256 if record.corpus else None,
        checkpoint_sha256=record.reference.checkpoint_sha256 if record.reference else None,
        figures={name: float(f"{value:.4g}") for name, value in figures(record).items()},
    )
