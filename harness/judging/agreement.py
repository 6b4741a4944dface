# SPDX-License-Identifier: Apache-2.0
"""Do a candidate's logprobs agree with the reference's: findings, near ties, worst positions.

For tokens that the candidate generated and for those of a prompt alike: the reference is
teacher-forced over them, so every position is a decision on the same prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from harness.evidence.scores import RequestScores, ScoredTokens
from harness.evidence.verdict import Finding, NearTie, Verdict, WorstPosition
from harness.judging import metrics, tolerance
from harness.judging.metrics import Metric
from harness.judging.positions import Positions, Share

Tokens = Literal["decode", "prompt"]
Pairs = Sequence[tuple[ScoredTokens, RequestScores]]

_WORST_POSITIONS = 3


class Unscored(ValueError):
    """A record without the scores that budgets are made of; the message says what to do."""


def metrics_of(tokens: Tokens) -> dict[str, Metric]:
    """Return what `findings` measures of generated tokens, or of a prompt's."""
    return {
        f"{tokens}_logprob_error_max": Metric("nats", "lower", 2.0, 1e-5),
        f"{tokens}_logprob_error_mean": Metric("nats", "lower", 2.0, 1e-5),
        "top20_kl_max": Metric("nats", "lower", 4.0, 1e-8),
        "top20_kl_mean": Metric("nats", "lower", 4.0, 1e-8),
        "total_variation_max": Metric("", "lower", 2.0, 1e-5),
        "total_variation_mean": Metric("", "lower", 2.0, 1e-5),
        "share_past_floor": Metric("", "lower", 2.0, 0.05),
        "share_past_budget": Metric("", "lower", 2.0, 0.01),
    }


def findings(precision: tolerance.Precision, pairs: Pairs, tokens: Tokens) -> Iterator[Finding]:
    """Yield mean and worst position of each metric, and the shares of positions past their own limits.

    Raises:
        Unscored: a request lacks what references that differ in rounding only are off.
    """
    positions = positions_of(precision, pairs)
    for name in metrics.JUDGED:
        resolutions = tolerance.metric_resolution(name, positions.steps)
        for kind in ("max", "mean"):
            observed = _summary(kind, positions.errors[name])
            floor = limit = None
            if precision.has_ties:
                floor = _floor(name, kind, positions, pairs)
                limit = tolerance.budget(name, floor, _summary(kind, resolutions))
            elif name == "decode_logprob_error":
                floor = tolerance.fp32_floor(
                    [_summary(kind, one) for one in positions.roundings[name]]
                )
                limit = tolerance.FP32_FACTOR * floor
            # Not `observed > limit`: NaN must not pass.
            passed = bool(np.isfinite(observed)) and (limit is None or observed <= limit)
            metric = f"{name.replace('decode', tokens)}_{kind}"
            yield Finding(
                metric=metric, observed=observed, budget=limit, floor=floor, passed=passed
            )
    if precision.has_ties:
        yield _share_finding("share_past_floor", positions.past_floor())
        yield _share_finding("share_past_budget", positions.past_budget())


def _share_finding(metric: str, share: Share) -> Finding:
    return Finding(
        metric=metric,
        observed=share.observed,
        budget=share.budget,
        floor=share.floor,
        passed=share.observed <= share.budget,
    )


def positions_of(precision: tolerance.Precision, pairs: Pairs) -> Positions:
    """Return the errors at all positions of a cell, its requests one after another."""
    return Positions(
        errors={
            name: np.concatenate(
                [
                    function(getattr(scores.reference, field), getattr(request, field))
                    for request, scores in pairs
                ]
            )
            for name, (function, field) in metrics.JUDGED.items()
        },
        roundings={
            name: np.concatenate([_roundings(scores)[name] for _, scores in pairs], axis=1)
            for name in metrics.FLOORED
        },
        steps=np.concatenate(
            [
                tolerance.resolution(scores.reference.max_abs_logit, precision.mantissa_bits)
                for _, scores in pairs
            ]
        ),
    )


def past_budget(found: Iterable[Finding]) -> list[str]:
    """Return a sentence for each finding that did not pass."""
    return [
        f"{finding.metric} {finding.observed:.3g} is past its budget {finding.budget:.3g}"
        if finding.budget is not None
        else f"{finding.metric} is {finding.observed}"
        for finding in found
        if not finding.passed
    ]


def measured_only(verdict: Verdict, why: str) -> Verdict:
    """Return a verdict that no budget decides, as the port has no floor for it; NaN still fails."""
    if not all(np.isfinite(finding.observed) for finding in verdict.findings):
        return verdict
    reasons = [f"measured only: {why}", *verdict.reasons]
    return verdict.model_copy(update={"verdict": "pass", "reasons": reasons})


def greedy(precision: tolerance.Precision, pairs: Pairs) -> tuple[list[NearTie], list[NearTie]]:
    """Return tokens that are not the reference's own: near ties, and those that are none.

    A near tie is one to the reference, or to the port in the served precision: it is within the budget
    that the margin between two tokens has at its position. The tokens equal the reference's greedy
    decoding when no position differs. In FP32 there are no ties.
    """
    near_ties: list[NearTie] = []
    mismatches: list[NearTie] = []
    limits = iter(
        _limits(precision, "margin", positions_of(precision, pairs))
        if precision.has_ties
        else np.zeros(sum(len(request.token_ids) for request, _ in pairs))
    )
    for request, scores in pairs:
        for position, token in enumerate(request.token_ids):
            limit = float(next(limits))
            preferred = scores.reference.argmax[position]
            if preferred == token:
                continue
            margin = min(
                one.argmax_logprobs[position] - one.logprobs[position]
                for one in (scores.reference, scores.port)
                if one is not None
            )
            tie = NearTie(
                request=request.id,
                position=position,
                token_id=token,
                reference_token_id=preferred,
                margin_nats=margin,
                limit_nats=limit,
            )
            (near_ties if 0 < limit >= margin else mismatches).append(tie)
    mismatches.sort(key=lambda tie: -tie.margin_nats)
    return near_ties, mismatches


def mismatch_reasons(mismatches: Sequence[NearTie]) -> list[str]:
    """Return a sentence for each of the worst mismatches."""
    return [
        f"{tie.request} position {tie.position}: token {tie.token_id}, but the reference prefers "
        f"{tie.reference_token_id} by {tie.margin_nats:.3g} nats (a tie is {tie.limit_nats:.3g})"
        for tie in mismatches[:_WORST_POSITIONS]
    ]


def worst(precision: tolerance.Precision, pairs: Pairs) -> list[WorstPosition]:
    """Return the positions of largest logprob error beyond their budget, NaN first."""
    cell = positions_of(precision, pairs)
    errors = cell.errors["decode_logprob_error"]
    floors = cell.floors("decode_logprob_error")
    budgets = _limits(precision, "decode_logprob_error", cell)
    places = [(request, scores, n) for request, scores in pairs for n in range(_length(request))]
    beyond = np.where(np.isnan(errors), np.inf, errors - budgets)
    return [
        WorstPosition(
            request=places[at][0].id,
            position=places[at][2],
            token_id=places[at][0].token_ids[places[at][2]],
            reference=places[at][1].reference.logprobs[places[at][2]],
            candidate=places[at][0].logprobs[places[at][2]],
            floor=float(floors[at]),
            budget=float(budgets[at]),
        )
        for at in np.argsort(-beyond, kind="stable")[:_WORST_POSITIONS]
    ]


def past_positions(precision: tolerance.Precision, pairs: Pairs) -> dict[tuple[str, int], float]:
    """Return the logprob error at each position past its own budget, by request and position."""
    cell = positions_of(precision, pairs)
    errors = cell.errors["decode_logprob_error"]
    budgets = _limits(precision, "decode_logprob_error", cell)
    places = [(request.id, n) for request, _ in pairs for n in range(_length(request))]
    return {
        place: float("inf") if np.isnan(error) else float(error)
        for place, error, limit in zip(places, errors, budgets, strict=True)
        if not error <= limit  # not `error > limit`: NaN must count
    }


def _limits(precision: tolerance.Precision, metric: str, cell: Positions) -> metrics.Array:
    """Return the limit of each position, (T,): in FP32, where no rounding tips, one for all."""
    if precision.has_ties:
        return cell.budgets(metric)
    return np.full_like(cell.steps, _fp32_limit(cell))


def _fp32_limit(cell: Positions) -> float:
    worsts = [_summary("max", one) for one in cell.roundings["decode_logprob_error"]]
    return tolerance.FP32_FACTOR * tolerance.fp32_floor(worsts)


def _length(request: ScoredTokens) -> int:
    return len(request.token_ids)


def _summary(kind: str, values: metrics.Array) -> float:
    return float(values.max() if kind == "max" else values.mean())


def _roundings(scores: RequestScores) -> dict[str, list[list[float]]]:
    if scores.roundings is None or scores.prompt_floor is None:
        raise Unscored(
            "the record has no references that differ in rounding only, being of before December "
            "2026: run the cell again, or, of a parity cell, score the run again with "
            "`python -m harness score RUN OUT`"
        )
    return scores.roundings


def _floor(name: str, kind: str, positions: Positions, pairs: Pairs) -> float:
    """Return worst or mean error of the worst reference, at the pairs' positions and inside prompts."""
    inside = [scores.prompt_floor for _, scores in pairs if scores.prompt_floor is not None]
    own = positions.roundings[name]
    if kind == "max":
        return max(float(own.max()), *(floor.maximum[name] for floor in inside))
    count = own.shape[1] + sum(floor.positions for floor in inside)
    total = float(own.sum(1).max()) + sum(floor.mean[name] * floor.positions for floor in inside)
    return total / count
