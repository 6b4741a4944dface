# SPDX-License-Identifier: Apache-2.0
"""What a person reads on a terminal: one line a cell, and all that a failed one needs.

A failed cell prints its verdict, each metric with observed value, budget, floor and margin, where
it deviates, the positions of largest error, what it met, the log, and two commands: one runs this
cell alone, one judges it again without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.evidence.record import Record, Run
from harness.evidence.verdict import Finding
from harness.judging.numbers import number
from harness.kinds import KINDS
from harness.kinds.kind import Kind


def kind_of(record: Record[Any]) -> Kind[Any, Any] | None:
    """Return the kind of a record that holds an observation of it."""
    kind = KINDS.get(record.kind)
    fits = kind is not None and isinstance(record.observation, kind.observations)
    return kind if fits else None


def headline(record: Record[Any]) -> Finding | None:
    """Return the finding that stands for the cell in a table: a failed one before the usual one."""
    findings = record.verdict.findings if record.verdict else []
    failed = next((finding for finding in findings if not finding.passed), None)
    usual = KINDS[record.kind].headlines if record.kind in KINDS else ()
    return failed or next((finding for finding in findings if finding.metric in usual), None)


def figures(record: Record[Any]) -> dict[str, float]:
    """Return every figure of a judged record by its metric."""
    if record.verdict is None:
        return {}
    found = {finding.metric: finding.observed for finding in record.verdict.findings}
    kind = kind_of(record)
    return found | dict(kind.figures(record) if kind else ())


def cached_tokens(record: Record[Any]) -> int | None:
    """Return the tokens of all requests that came from the prefix cache; None without an engine."""
    found = figures(record).get("cached_tokens")
    return None if found is None else round(found)


def table(found: Sequence[Record[Any]]) -> str:
    """Return cells with observed error, budget and verdict, as aligned text."""
    heads = ("cell", "verdict", "metric", "observed", "budget", "floor", "cached", "s")
    rows = []
    for record in found:
        finding = headline(record)
        cached = cached_tokens(record)
        rows.append(
            (
                record.cell,
                record.verdict.verdict if record.verdict else "-",
                finding.metric if finding else "-",
                number(finding.observed if finding else None),
                number(finding.budget if finding else None),
                number(finding.floor if finding else None),
                "-" if cached is None else str(cached),
                f"{sum(record.timings_s.values()):.1f}",
            )
        )
    return text_table(heads, rows)


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns under their heads."""
    text = tabulate(rows, heads, tablefmt="plain", disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def describe(record: Record[Any], header: Run, run: Path) -> str:
    """Return all that is known of a cell that did not pass, for a terminal."""
    verdict, kind = record.verdict, kind_of(record)
    lines = [f"{verdict.verdict if verdict else 'not judged'}: {record.cell}"]
    if verdict is not None:
        lines += [f"  {reason}" for reason in verdict.reasons]
        if verdict.findings:
            lines += [f"  {line}" for line in _findings(verdict.findings).splitlines()]
        lines += [f"  {line}" for line in (kind.deviations(record) if kind else ())]
        if verdict.worst:
            lines.append("  worst positions")
            lines += [
                f"    {place.request}[{place.position}] token {place.token_id}: reference "
                f"{place.reference:.6f}, candidate {place.candidate:.6f}"
                + (
                    ""
                    if place.budget is None
                    else f", floor {number(place.floor)}, budget {number(place.budget)}"
                )
                for place in verdict.worst
            ]
        lines += [
            f"  near tie {tie.request}[{tie.position}]: token {tie.token_id} "
            f"for {tie.reference_token_id}, "
            f"margin {tie.margin_nats:.3g} of {tie.limit_nats:.3g} nats"
            for tie in verdict.near_ties
        ]
    lines += [f"  {line}" for line in (kind.circumstances(record) if kind else ())]
    if record.failure is not None and record.failure.log_tail:
        lines += [
            "  end of the log",
            *(f"    {line}" for line in record.failure.log_tail.splitlines()),
        ]
    if record.log is not None:
        lines.append(f"  log: {run / record.log}")
    lines.append(f"  run it alone: pytest {header.matrix_path} --cell {record.cell}")
    lines.append(f"  judge it again: python -m harness judge {run} --cell {record.cell}")
    return "\n".join(lines)


def _findings(findings: Sequence[Finding]) -> str:
    rows = [
        (
            finding.metric,
            *map(number, (finding.observed, finding.budget, finding.floor, finding.margin)),
            "" if finding.passed else "<-",
        )
        for finding in findings
    ]
    return text_table(("metric", "observed", "budget", "floor", "margin", ""), rows)
