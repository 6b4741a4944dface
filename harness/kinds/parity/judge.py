# SPDX-License-Identifier: Apache-2.0
"""The verdict on a parity cell: did it reach what it claims, and does the reference agree."""

from __future__ import annotations

import numpy as np

from harness.evidence.engine import EngineFacts
from harness.evidence.record import Record
from harness.evidence.scores import Reference
from harness.evidence.verdict import ReachFact, Verdict
from harness.judging import agreement, findings, sameness, tolerance
from harness.kinds.parity import reach
from harness.kinds.parity.observation import EngineObservation
from harness.kinds.parity.settings import ParitySettings


def judge(settings: ParitySettings, record: Record[EngineObservation]) -> Verdict:
    """Decide from what the engine gave and what the reference says of it."""
    observation = record.observation
    assert observation is not None
    facts = reach.check(settings, observation)
    if findings.missed(facts):
        return findings.not_reached(facts)
    if settings.against == "itself":
        verdict = _numbers_only(observation, facts)
    elif record.reference is None:
        return findings.error("the record holds no reference", facts)
    else:
        verdict = _judge(settings.precision, observation, record.reference, facts)
        if (why := settings.measure_only) is not None:
            verdict = agreement.measured_only(verdict, why)
    verdict = sameness.judged(verdict, observation.repetitions, settings.workload.spread)
    return _without_reloads(verdict, observation.facts)


def _without_reloads(verdict: Verdict, facts: EngineFacts) -> Verdict:
    """Return the verdict, a fail where torch.compile generated what may race (generated_code.py)."""
    if not facts.generated_kernels:
        return verdict
    found = facts.reloading_kernels
    reasons = [f"generated kernel {one} is loaded after a store to it" for one in found]
    return verdict.model_copy(
        update={
            "verdict": "fail" if found else verdict.verdict,
            "reasons": verdict.reasons + reasons,
            "findings": [*verdict.findings, findings.none_expected("reloads", len(found))],
        }
    )


def _numbers_only(observation: EngineObservation, facts: list[ReachFact]) -> Verdict:
    """Pass logprobs without a reference: NaN has the same bits each time, and is none."""
    reasons = [
        f"{request.id}: a logprob is no finite number"
        for request in observation.requests
        if not (np.isfinite(request.logprobs).all() and np.isfinite(request.top_logprobs).all())
    ]
    return Verdict(verdict="fail" if reasons else "pass", reasons=reasons, reach=facts)


def _judge(
    precision_name: str,
    observation: EngineObservation,
    reference: Reference,
    facts: list[ReachFact],
) -> Verdict:
    if len(reference.requests) != len(observation.requests):
        reason = f"{len(observation.requests)} requests but {len(reference.requests)} references"
        return findings.error(reason, facts)
    precision = tolerance.precision(precision_name)
    pairs = list(zip(observation.requests, reference.requests, strict=True))
    try:
        near_ties, mismatches = agreement.greedy(precision, pairs)
        found = [
            findings.none_expected("greedy_mismatches", len(mismatches)),
            *agreement.findings(precision, pairs, "decode"),
        ]
    except agreement.Unscored as fault:
        return findings.error(str(fault), facts)
    reasons = agreement.past_budget(found) + agreement.mismatch_reasons(mismatches)
    return Verdict(
        verdict="fail" if reasons else "pass",
        reasons=reasons,
        findings=found,
        reach=facts,
        near_ties=near_ties,
        worst=agreement.worst(precision, pairs),
    )
