# SPDX-License-Identifier: Apache-2.0
"""The verdict on a parity cell: did it reach what it claims, and does the reference agree."""

from __future__ import annotations

from harness.evidence.record import Record
from harness.evidence.scores import Reference
from harness.evidence.verdict import ReachFact, Verdict
from harness.judging import agreement, findings, tolerance
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
    if record.reference is None:
        return findings.error("the record holds no reference", facts)
    verdict = _judge(settings.precision, observation, record.reference, facts)
    why = settings.measure_only
    return verdict if why is None else agreement.measured_only(verdict, why)


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
    limit = agreement.near_tie_limit(precision, pairs)
    near_ties, mismatches = agreement.greedy(pairs, limit)
    found = [
        findings.none_expected("greedy_mismatches", len(mismatches)),
        *agreement.findings(precision, pairs, "decode"),
    ]
    reasons = agreement.past_budget(found) + agreement.mismatch_reasons(mismatches)
    return Verdict(
        verdict="fail" if reasons else "pass",
        reasons=reasons,
        findings=found,
        reach=facts,
        near_ties=near_ties,
        worst=agreement.worst(pairs),
    )
