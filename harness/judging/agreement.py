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

Tokens = Literal["decode", "prompt"]
Pairs = Sequence[tuple[ScoredTokens, RequestScores]]

_WORST_POSITIONS = 3


def metrics_of(tokens: Tokens) -> dict[str, Metric]:
    """Return what `findings` measures of generated tokens, or of a prompt's."""
    return {
        f"{tokens}_logprob_error_max": Metric("nats", "lower", 2.0, 1e-5),
        f"{tokens}_logprob_error_mean": Metric("nats", "lower", 2.0, 1e-5),
        "top20_kl_max": Metric("nats", "lower", 4.0, 1e-8),
        "top20_kl_mean": Metric("nats", "lower", 4.0, 1e-8),
        "total_variation_max": Metric("", "lower", 2.0, 1e-5),
        "total_variation_mean": Metric("", "lower", 2.0, 1e-5),
    }


def findings(precision: tolerance.Precision, pairs: Pairs, tokens: Tokens) -> Iterator[Finding]:
    """Yield mean and worst position of each metric, over all positions of the cell."""
    steps = np.concatenate(
        [
            tolerance.resolution(scores.reference.max_abs_logit, precision.mantissa_bits)
            for _, scores in pairs
        ]
    )
    for name, (function, field) in metrics.JUDGED.items():
        errors = np.concatenate(
            [
                function(getattr(scores.reference, field), getattr(request, field))
                for request, scores in pairs
            ]
        )
        floors = _floors(name, pairs) if precision.has_floor else (None, None)
        resolutions = tolerance.metric_resolution(name, steps)
        for kind, floor in zip(("max", "mean"), floors, strict=True):
            observed = _summary(kind, errors)
            limit = None
            if floor is not None:
                limit = tolerance.budget(name, floor, _summary(kind, resolutions))
            elif name == "decode_logprob_error":
                limit = tolerance.FP32_LIMIT_NATS
            # Not `observed > limit`: NaN must not pass.
            passed = bool(np.isfinite(observed)) and (limit is None or observed <= limit)
            metric = f"{name.replace('decode', tokens)}_{kind}"
            yield Finding(
                metric=metric, observed=observed, budget=limit, floor=floor, passed=passed
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


def near_tie_limit(precision: tolerance.Precision, pairs: Pairs) -> float:
    """Return how much the reference may prefer its own token for another to pass as a tie, nats.

    Without a noise floor (FP32) it is 0 and there are no ties.
    """
    return tolerance.near_tie_limit(_floors("margin", pairs)[0] if precision.has_floor else 0.0)


def greedy(pairs: Pairs, limit: float) -> tuple[list[NearTie], list[NearTie]]:
    """Return tokens that are not the reference's own: those within the limit, and those past it.

    The tokens equal the reference's greedy decoding when no position differs.
    """
    near_ties: list[NearTie] = []
    mismatches: list[NearTie] = []
    for request, scores in pairs:
        for position, token in enumerate(request.token_ids):
            preferred = scores.reference.argmax[position]
            if preferred == token:
                continue
            margin = (
                scores.reference.argmax_logprobs[position] - scores.reference.logprobs[position]
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


def worst(pairs: Pairs) -> list[WorstPosition]:
    """Return the positions of largest logprob error, NaN first."""
    places = []
    for request, scores in pairs:
        for position, error in enumerate(
            metrics.logprob_error(scores.reference.logprobs, request.logprobs)
        ):
            port = scores.port.logprobs[position] if scores.port else None
            place = WorstPosition(
                request=request.id,
                position=position,
                token_id=request.token_ids[position],
                reference=scores.reference.logprobs[position],
                candidate=request.logprobs[position],
                port=port,
            )
            places.append((float("inf") if np.isnan(error) else float(error), place))
    places.sort(key=lambda item: -item[0])
    return [place for _, place in places[:_WORST_POSITIONS]]


def _summary(kind: str, values: metrics.Array) -> float:
    return float(values.max() if kind == "max" else values.mean())


def _floors(name: str, pairs: Pairs) -> tuple[float, float]:
    """Return worst and mean error of the port, over the pairs' positions and inside prompts."""
    function, field = metrics.FLOORED[name]
    largest, total, count = [], 0.0, 0
    for _, scores in pairs:
        if scores.port is None or scores.prompt_floor is None:
            raise ValueError("the reference has no floor for this precision: score the run again")
        errors = function(getattr(scores.reference, field), getattr(scores.port, field))
        inside = scores.prompt_floor
        largest += [float(errors.max()), inside.maximum[name]]
        total += float(errors.sum()) + inside.mean[name] * inside.positions
        count += len(errors) + inside.positions
    return float(np.max(largest)), total / count
