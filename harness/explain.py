# SPDX-License-Identifier: Apache-2.0
"""What a person reads on a terminal: one line a cell, and all that a failed one needs.

A failed cell prints its verdict, each metric with observed value, budget, floor and margin, where
it deviates, the positions of largest error, the cache hits, the log, and two commands: one runs
this cell alone, one judges it again without an engine.

Where it deviates tells faults apart. A prefill that went wrong shows in the first token, a state or
cache that decoding reads shows from the second on, and a fault of one feature of the engine shows
only in requests that met it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records import EngineObservation, Finding, Record, RequestObservation, Run, Verdict

_HEADLINES = (
    "decode_logprob_error_max",
    "prompt_logprob_error_max",
    "parser_faults",
    "answer_faults",
    "different_answers",
    "decode_tok_s",
    "prefill_tok_s",
)

_Met = Callable[[RequestObservation, Mapping[str, Any]], bool]
_MET: dict[str, _Met] = {  # what a request may have met in the engine; the settings are its cell's
    "a prefix-cache hit": lambda request, _: request.num_cached_tokens > 0,
    "a preemption": lambda request, _: request.num_preemptions > 0,
    "company in the batch": lambda request, settings: (
        settings["workload"]["rounds"][request.round]["schedule"] != "alone"
    ),
    "an earlier round": lambda request, _: request.round > 0,
}


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
        lines += [f"  {line}" for line in where(record)]
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


def where(record: Record) -> list[str]:
    """Which requests deviate, from which token on, and what they and no others met."""
    observation, verdict = record.observation, record.verdict
    if not isinstance(observation, EngineObservation) or verdict is None:
        return []
    deviations = _deviations(record, observation, verdict)
    if not deviations:
        failed = any(not finding.passed for finding in verdict.findings)
        return ["no logprob alone is past its budget: see the figures marked <-"] if failed else []
    errors = [error for positions in deviations.values() for error in positions.values()]
    total = sum(len(request.token_ids) for request in observation.requests)
    first = [name for name, positions in deviations.items() if 0 in positions]
    later = [name for name in deviations if name not in first]
    median = number(statistics.median(errors))
    lines = [
        f"deviates at {len(errors)} of {total} positions, there by {median} nats in the median"
    ]
    if first:
        lines.append(f"  from the first token (prefill): {_named(first, record, observation)}")
    if later:
        earliest = min(min(deviations[name]) for name in later)
        lines.append(
            f"  from token {earliest + 1} or later, the first one right (decoding): "
            f"{_named(later, record, observation)}"
        )
    return lines


def _deviations(
    record: Record, observation: EngineObservation, verdict: Verdict
) -> dict[str, dict[int, float]]:
    """Logprob error by position of each request with a position past the budget of the worst one.

    A token that is not the reference's own counts too, unless it passed as a near tie.
    """
    budgets = {finding.metric: finding.budget for finding in verdict.findings}
    limit = budgets.get("decode_logprob_error_max")
    if limit is None or record.reference is None:
        return {}
    ties = {(tie.request, tie.position) for tie in verdict.near_ties}
    found: dict[str, dict[int, float]] = {}
    for request, scores in zip(observation.requests, record.reference.requests, strict=True):
        for position, token in enumerate(request.token_ids):
            error = abs(request.logprobs[position] - scores.reference.logprobs[position])
            other = token != scores.reference.argmax[position]
            # Not `error > limit`: NaN must count.
            if not error <= limit or (other and (request.id, position) not in ties):
                error = math.inf if math.isnan(error) else error
                found.setdefault(request.id, {})[position] = error
    return found


def _named(names: Sequence[str], record: Record, observation: EngineObservation) -> str:
    """Requests by their count, and what they met if only they did, or else they among others."""
    requests = {request.id: request for request in observation.requests}
    text = f"{len(names)} of {len(requests)} requests"
    met = {
        what: {name for name, request in requests.items() if has(request, record.settings)}
        for what, has in _MET.items()
    }
    candidates = {
        what: those for what, those in met.items() if set(names) <= those < requests.keys()
    }
    if not candidates:
        return text
    what = min(candidates, key=lambda what: len(candidates[what]))
    scope = "exactly" if len(candidates[what]) == len(names) else "only"
    return f"{text}, {scope} those with {what}"


def _finding_line(finding: Finding) -> str:
    figures = (finding.observed, finding.budget, finding.floor, finding.margin)
    marks = "" if finding.passed else "  <-"
    return (
        f"    {finding.metric:<26}" + "".join(f"{number(value):<10}" for value in figures) + marks
    )
