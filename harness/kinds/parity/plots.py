# SPDX-License-Identifier: Apache-2.0
"""The plots of a parity run.

A value means the same in every plot: the colour is the cell's first axis (its dtype), a filled mark
is what was observed, a vertical tick is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.evidence.record import Record
from harness.evidence.scores import Scores
from harness.evidence.verdict import Finding
from harness.judging import metrics
from harness.kinds.kind import Plot
from harness.kinds.parity import explain
from harness.kinds.parity.observation import EngineObservation, RequestObservation

_Records = list[Record[EngineObservation]]
_Style = Mapping[str, str]

# Okabe and Ito's colours: told apart with every kind of colour vision, on white and on black.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def plots(found: Sequence[Record[EngineObservation]]) -> list[Plot]:
    """Return the plots of a run, each with the records that it has data for."""
    ran = [record for record in found if record.observation is not None]
    scored = [record for record in ran if record.reference is not None and _findings(record)]
    any_hit = any(request.num_cached_tokens for r in ran for request in _requests(r))
    return [
        Plot(
            "Share of the budget used",
            "Largest decode logprob error over its budget, per cell; 1 is the limit.",
            _plot_budget_used,
            [record for record in scored if _budget_used(record) is not None],
        ),
        Plot(
            "Top-20 KL per cell",
            "KL(reference || vLLM), nats: dot, mean over positions; bar, up to the worst one.",
            _plot_kl,
            scored,
        ),
        Plot(
            "Decode logprob error along the position",
            "Largest error over the requests of a cell, nats, by generated token; one line a cell.",
            _plot_error_along_position,
            scored,
            inches=3.6,
        ),
        Plot(
            "Tokens from the prefix cache",
            "Of all prompt tokens of the cell; grey is what had to be computed.",
            _plot_cached_tokens,
            ran if any_hit else [],
        ),
        Plot(
            "Latency",
            "Mean time to first token (dot) and per output token (cross), milliseconds.",
            _plot_latency,
            [record for record in ran if "tpot_ms" in _figures(record)],
        ),
    ]


def _rows(axes: Any, found: _Records) -> range:
    """One row a cell, the first on top."""
    axes.set_yticks(range(len(found)), [record.cell for record in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(axis="x", linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    return range(len(found))


def _colours(found: _Records) -> list[str]:
    values = list(dict.fromkeys(_first_axis(record) for record in found))
    return [_COLOURS[values.index(_first_axis(record)) % len(_COLOURS)] for record in found]


def _first_axis(record: Record[EngineObservation]) -> str:
    return next(iter(record.axes.values()))


def _legend(axes: Any, found: _Records) -> None:
    """Name the colours, beside the marks."""
    for value, colour in dict(zip(map(_first_axis, found), _colours(found), strict=True)).items():
        axes.plot([], [], "o", color=colour, label=value)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.2)


def _findings(record: Record[EngineObservation]) -> list[Finding]:
    return record.verdict.findings if record.verdict else []


def _figures(record: Record[EngineObservation]) -> dict[str, float]:
    return {finding.metric: finding.observed for finding in _findings(record)} | dict(
        explain.figures(record)
    )


def _requests(record: Record[EngineObservation]) -> list[RequestObservation]:
    return record.observation.requests if record.observation else []


def _references(record: Record[EngineObservation]) -> list[Scores]:
    found = record.reference.requests if record.reference else []
    return [scores.reference for scores in found]


def _budget_used(record: Record[EngineObservation]) -> float | None:
    for finding in _findings(record):
        if finding.metric == "decode_logprob_error_max" and finding.budget:
            return finding.observed / finding.budget
    return None


def _plot_budget_used(axes: Any, found: _Records, style: _Style) -> None:
    rows = _rows(axes, found)
    shares = [_budget_used(record) or 0.0 for record in found]
    axes.barh(rows, shares, height=0.55, color=_colours(found))
    axes.axvline(1.0, color=style["limit"], linewidth=1.4)
    axes.set_xlim(0, max(1.1, 1.05 * max(shares)))
    axes.set_xlabel("observed / budget")
    _legend(axes, found)


def _plot_kl(axes: Any, found: _Records, style: _Style) -> None:
    rows = _rows(axes, found)
    smallest = 1e-16  # of a log axis; rounding makes a divergence of 0 slightly negative
    for row, record, colour in zip(rows, found, _colours(found), strict=True):
        values = _figures(record)
        mean = max(values["top20_kl_mean"], smallest)
        worst = max(values["top20_kl_max"], smallest)
        axes.plot(
            [mean, worst], [row, row], color=colour, linewidth=2, solid_capstyle="butt", alpha=0.5
        )
        axes.plot([mean], [row], "o", color=colour, markersize=5)
        budget = next((f.budget for f in _findings(record) if f.metric == "top20_kl_max"), None)
        if budget is not None:
            axes.plot([budget], [row], "|", color=style["limit"], markersize=9, markeredgewidth=1.6)
    axes.set_xscale("log")
    axes.set_xlabel("nats")
    _legend(axes, found)


def _plot_error_along_position(axes: Any, found: _Records, style: _Style) -> None:
    del style
    for record, colour in zip(found, _colours(found), strict=True):
        errors = [
            metrics.logprob_error(scores.logprobs, request.logprobs)
            for request, scores in zip(_requests(record), _references(record), strict=True)
        ]
        length = max(map(len, errors))
        padded = np.full((len(errors), length), np.nan)
        for row, values in zip(padded, errors, strict=True):
            row[: len(values)] = values
        worst = np.maximum(np.nanmax(padded, axis=0), 1e-9)
        axes.plot(range(1, length + 1), worst, color=colour, linewidth=1.1, alpha=0.6)
    axes.set_yscale("log")
    axes.grid(axis="y", linewidth=0.6)
    axes.set_xlabel("generated token")
    axes.set_ylabel("nats")
    _legend(axes, found)


def _plot_cached_tokens(axes: Any, found: _Records, style: _Style) -> None:
    rows = _rows(axes, found)
    cached, computed = [], []
    for record in found:
        requests = _requests(record)
        cached.append(sum(request.num_cached_tokens for request in requests))
        computed.append(sum(request.num_prompt_tokens for request in requests) - cached[-1])
    axes.barh(rows, cached, height=0.55, color=_colours(found))
    axes.barh(rows, computed, left=cached, height=0.55, color=style["grid"])
    axes.set_xlabel("prompt tokens")
    _legend(axes, found)


def _plot_latency(axes: Any, found: _Records, style: _Style) -> None:
    del style
    rows = _rows(axes, found)
    for row, record, colour in zip(rows, found, _colours(found), strict=True):
        values = _figures(record)
        if "ttft_ms" in values:
            axes.plot([values["ttft_ms"]], [row], "o", color=colour, markersize=5)
        if "tpot_ms" in values:
            axes.plot([values["tpot_ms"]], [row], "x", color=colour, markersize=5)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    _legend(axes, found)
