# SPDX-License-Identifier: Apache-2.0
"""The figures of a record: what comparisons, baselines and reports look at.

A summary is small and has no paths or machine names, so that it can be kept in the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from harness import metrics
from harness.environment import card_name
from harness.records import EngineObservation, Record, VerdictName


class CellSummary(BaseModel):
    """A cell in a few numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    verdict: VerdictName
    cell_sha256: str
    corpus_sha256: str | None
    checkpoint_sha256: str | None
    figures: dict[str, float]


class RunSummary(BaseModel):
    """The cells of a run; what a baseline file holds."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    schema_version: Literal[1] = 1
    matrix: str
    card: str
    processor: str
    versions: dict[str, str]
    date: str
    cells: dict[str, CellSummary]


def summarise_run(
    found: list[Record], matrix: str, date: str, environment: dict[str, Any]
) -> RunSummary:
    """Summarise the records of a run."""
    return RunSummary(
        matrix=matrix,
        card=card_name(environment),
        processor=environment["machine"]["processor"],
        versions=environment["versions"],
        date=date,
        cells={record.cell: summarise(record) for record in found},
    )


def summarise(record: Record) -> CellSummary:
    """Summarise one judged record."""
    return CellSummary(
        verdict=record.verdict.verdict if record.verdict else "error",
        cell_sha256=record.identity.cell_sha256,
        corpus_sha256=record.corpus.sha256 if record.corpus else None,
        checkpoint_sha256=record.reference.checkpoint_sha256 if record.reference else None,
        figures={name: float(f"{value:.4g}") for name, value in figures(record)},
    )


def figures(record: Record) -> Iterator[tuple[str, float]]:
    """Name and value of everything in `metrics.METRICS` that the record has."""
    if record.verdict is None:
        return
    for finding in record.verdict.findings:
        yield finding.metric, finding.observed
    if not isinstance(record.observation, EngineObservation):
        return
    requests = record.observation.requests
    yield "cached_tokens", sum(request.num_cached_tokens for request in requests)
    if record.reference is not None and record.verdict.findings:
        yield "near_ties", len(record.verdict.near_ties)
        exact = [
            value for scores in record.reference.requests for value in scores.reference.logprobs
        ]
        observed = [value for request in requests for value in request.logprobs]
        yield "sqnr_db", metrics.sqnr_db(exact, observed)
    first = [request.ttft_ms for request in requests if request.ttft_ms is not None]
    if first:
        yield "ttft_ms", float(np.mean(first))
    between = [
        (request.e2el_ms - request.ttft_ms) / (len(request.token_ids) - 1)
        for request in requests
        if request.e2el_ms is not None
        and request.ttft_ms is not None
        and len(request.token_ids) > 1
    ]
    if between:
        yield "tpot_ms", float(np.mean(between))
