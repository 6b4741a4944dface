# SPDX-License-Identifier: Apache-2.0
"""What a person reads on a terminal: one line a cell, and all that a failed one needs.

A failed cell prints its verdict, each metric with observed value, budget, floor and margin, the
positions of largest error, the cache hits, the log, and two commands: one runs this cell alone, one
judges it again without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.records import EngineObservation, Finding, Record, Run

_HEADLINES = ("decode_logprob_error_max", "parser_faults")


def number(value: float | None) -> str:
    """A figure with three significant digits, or a dash."""
    return "-" if value is None else f"{value:.3g}"


def headline(record: Record) -> Finding | None:
    """The finding that stands for the cell in a table: a failed one before the usual one."""
    findings = record.verdict.findings if record.verdict else []
    failed = next((finding for finding in findings if not finding.passed), None)
    return failed or next((finding for finding in findings if finding.metric in _HEADLINES), None)


def cached_tokens(record: Record) -> int | None:
    """Tokens of all requests that came from the prefix cache; None without an engine."""
    if not isinstance(record.observation, EngineObservation):
        return None
    return sum(request.num_cached_tokens for request in record.observation.requests)


def table(found: Sequence[Record]) -> str:
    """Cells with observed error, budget and verdict, as aligned text."""
    rows = [("cell", "verdict", "metric", "observed", "budget", "floor", "cached", "s")]
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
    return text_table(rows)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def describe(record: Record, header: Run, run: Path) -> str:
    """All that is known of a cell that did not pass, for a terminal."""
    verdict = record.verdict
    lines = [f"{verdict.verdict if verdict else 'not judged'}: {record.cell}"]
    if verdict is not None:
        lines += [f"  {reason}" for reason in verdict.reasons]
        if verdict.findings:
            lines.append("  metric                      observed  budget    floor     margin")
            lines += [_finding_line(finding) for finding in verdict.findings]
        if verdict.worst:
            lines.append("  worst positions")
            lines += [
                f"    {place.request}[{place.position}] token {place.token_id}: reference "
                f"{place.reference:.6f}, candidate {place.candidate:.6f}"
                + ("" if place.port is None else f", port {place.port:.6f}")
                for place in verdict.worst
            ]
        lines += [
            f"  near tie {tie.request}[{tie.position}]: token {tie.token_id} "
            f"for {tie.reference_token_id}, "
            f"margin {tie.margin_nats:.3g} of {tie.limit_nats:.3g} nats"
            for tie in verdict.near_ties
        ]
    if isinstance(record.observation, EngineObservation):
        hits = [
            f"{r.id} {r.num_cached_tokens}/{r.num_prompt_tokens}"
            for r in record.observation.requests
        ]
        lines.append(f"  cached tokens: {', '.join(hits)}")
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


def _finding_line(finding: Finding) -> str:
    figures = (finding.observed, finding.budget, finding.floor, finding.margin)
    marks = "" if finding.passed else "  <-"
    return (
        f"    {finding.metric:<26}" + "".join(f"{number(value):<10}" for value in figures) + marks
    )
