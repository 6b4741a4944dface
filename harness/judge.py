# SPDX-License-Identifier: Apache-2.0
"""The verdict on a record: a pure function of the evidence; a wrong limit costs no engine time.

    error        there is no evidence: the engine, the reference or the disk failed
    not_reached  there is evidence, of something else than the cell claims
    fail         a metric is past its budget, or the reference clearly prefers another token
    pass         all else

`python -m harness judge RUN` decides every record of a run again and writes the verdicts back.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from harness import judge_measured, judge_soak, metrics, reach, records, tolerance
from harness.explain import describe, table
from harness.measurements import (
    PromptLogprobs,
    PromptObservation,
    ServedObservation,
    SoakObservation,
    SpeedObservation,
    TimingObservation,
)
from harness.records import (
    EngineObservation,
    Finding,
    NearTie,
    ParserObservation,
    Record,
    Reference,
    RequestObservation,
    RequestScores,
    Verdict,
    VerdictName,
    WorstPosition,
)

EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INFRASTRUCTURE = 3
EXIT_NOT_REACHED = 4

_WORST_POSITIONS = 3


def judge(record: Record) -> Verdict:
    """Decide a record from its evidence; an earlier verdict in it is not looked at."""
    refusal = record.settings.get("expect", {}).get("refusal")
    if record.failure is not None:
        return _judge_failure(record, refusal)
    if refusal is not None:
        return Verdict(
            verdict="fail", reasons=[f"the engine started; expected it to refuse: {refusal}"]
        )
    if isinstance(record.observation, ParserObservation):
        return _judge_parser(record.observation)
    if isinstance(record.observation, PromptObservation):
        return _judge_prompts(record.observation, record.reference)
    if isinstance(record.observation, ServedObservation):
        return judge_measured.judge_served(record.observation)
    if isinstance(record.observation, TimingObservation):
        return judge_measured.judge_timing(record.observation, record.settings["smoke"])
    if isinstance(record.observation, SpeedObservation):
        return judge_measured.judge_speed(record.observation, record.settings)
    if isinstance(record.observation, SoakObservation):
        return judge_soak.judge_soak(record.observation, record.settings["soak"])
    if record.observation is None:
        return Verdict(verdict="error", reasons=["the record holds no observation"])
    facts = reach.check(record.settings, record.observation)
    missed = [fact for fact in facts if not fact.reached]
    if missed:
        reasons = [f"{fact.fact}: expected {fact.expected}, found {fact.found}" for fact in missed]
        return Verdict(verdict="not_reached", reasons=reasons, reach=facts)
    if record.reference is None:
        return Verdict(verdict="error", reasons=["the record holds no reference"], reach=facts)
    verdict = _judge_parity(
        record.settings["precision"], record.observation, record.reference, facts
    )
    why = record.settings.get("measure_only")
    return verdict if why is None else _measured(verdict, why)


def exit_code(verdicts: Iterable[str]) -> int:
    """The exit code of a run with these verdicts; the gravest one wins."""
    names = set(verdicts)
    if "error" in names:
        return EXIT_INFRASTRUCTURE
    if "not_reached" in names or not names & {"pass", "fail"}:
        return EXIT_NOT_REACHED
    return EXIT_FAILED if "fail" in names else EXIT_PASSED


def _judge_failure(record: Record, refusal: str | None) -> Verdict:
    failure = record.failure
    assert failure is not None
    if refusal is not None and failure.kind == "refused":
        if re.search(refusal, failure.message):
            return Verdict(verdict="pass", reasons=[f"refused as expected: {failure.message}"])
        reason = f"refused, but not with the expected sentence ({refusal}): {failure.message}"
        return Verdict(verdict="fail", reasons=[reason])
    return Verdict(verdict="error", reasons=[f"{failure.kind}: {failure.message}"])


def _judge_parser(observation: ParserObservation) -> Verdict:
    if observation.comparisons == 0:
        return Verdict(verdict="not_reached", reasons=["no rendering was parsed"])
    count = float(len(observation.faults))
    finding = Finding(
        metric="parser_faults", observed=count, budget=0.0, floor=None, passed=count == 0
    )
    verdict: VerdictName = "pass" if finding.passed else "fail"
    return Verdict(verdict=verdict, reasons=observation.faults, findings=[finding])


def _judge_parity(
    precision_name: str,
    observation: EngineObservation,
    reference: Reference,
    facts: list[records.ReachFact],
) -> Verdict:
    if len(reference.requests) != len(observation.requests):
        reason = f"{len(observation.requests)} requests but {len(reference.requests)} references"
        return Verdict(verdict="error", reasons=[reason], reach=facts)
    precision = tolerance.precision(precision_name)
    pairs = list(zip(observation.requests, reference.requests, strict=True))
    findings = list(_findings(precision, pairs))
    limit = tolerance.near_tie_limit(_floors("margin", pairs)[0] if precision.has_floor else 0.0)
    near_ties, mismatches = _greedy(pairs, limit)
    findings.insert(
        0,
        Finding(
            metric="greedy_mismatches",
            observed=float(len(mismatches)),
            budget=0.0,
            floor=None,
            passed=not mismatches,
        ),
    )
    reasons = _past_budget(findings)
    reasons += [
        f"{tie.request} position {tie.position}: token {tie.token_id}, but the reference prefers "
        f"{tie.reference_token_id} by {tie.margin_nats:.3g} nats (a tie is {tie.limit_nats:.3g})"
        for tie in mismatches[:_WORST_POSITIONS]
    ]
    return Verdict(
        verdict="fail" if reasons else "pass",
        reasons=reasons,
        findings=findings,
        reach=facts,
        near_ties=near_ties,
        worst=_worst(pairs),
    )


def _judge_prompts(observation: PromptObservation, reference: Reference | None) -> Verdict:
    """Decide on the logprobs of prompts: their tokens are given, so none can be the wrong one."""
    if reference is None or len(reference.requests) != len(observation.prompts):
        return Verdict(verdict="error", reasons=["the record lacks reference scores of prompts"])
    settings = observation.settings
    name = {"float32": "fp32", "bfloat16": "bf16"}.get(settings.dtype)
    if name is None:
        reason = f"no precision is known for an engine in {settings.dtype}"
        return Verdict(verdict="error", reasons=[reason])
    precision = tolerance.precision(name)
    requests = [_as_request(prompt) for prompt in observation.prompts]
    pairs = list(zip(requests, reference.requests, strict=True))
    findings = [
        finding.model_copy(update={"metric": finding.metric.replace("decode_", "prompt_")})
        for finding in _findings(precision, pairs)
    ]
    reasons = _past_budget(findings)
    verdict = Verdict(
        verdict="fail" if reasons else "pass",
        reasons=reasons,
        findings=findings,
        worst=_worst(pairs),
    )
    if settings.quantization is None:
        return verdict
    return _measured(verdict, f"the floor is BF16's, and the engine has {settings.quantization}")


def _as_request(prompt: PromptLogprobs) -> RequestObservation:
    return RequestObservation(
        id=prompt.prompt,
        prompt=prompt.prompt,
        round=0,
        num_prompt_tokens=len(prompt.token_ids) + 1,
        token_ids=prompt.token_ids,
        logprobs=prompt.logprobs,
        top_token_ids=prompt.top_token_ids,
        top_logprobs=prompt.top_logprobs,
        num_cached_tokens=0,
        num_preemptions=0,
        finish_reason=None,
        ttft_ms=None,
        e2el_ms=None,
    )


def _past_budget(findings: Iterable[Finding]) -> list[str]:
    return [
        f"{finding.metric} {finding.observed:.3g} is past its budget {finding.budget:.3g}"
        if finding.budget is not None
        else f"{finding.metric} is {finding.observed}"
        for finding in findings
        if not finding.passed
    ]


def _measured(verdict: Verdict, why: str) -> Verdict:
    """A verdict that no budget decides, as the port has no floor for it; NaN still fails."""
    if not all(np.isfinite(finding.observed) for finding in verdict.findings):
        return verdict
    reasons = [f"measured only: {why}", *verdict.reasons]
    return verdict.model_copy(update={"verdict": "pass", "reasons": reasons})


_Pairs = list[tuple[RequestObservation, RequestScores]]


def _findings(precision: tolerance.Precision, pairs: _Pairs) -> Iterable[Finding]:
    """Mean and worst position of each metric, over all generated positions of the cell."""
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
            yield Finding(
                metric=f"{name}_{kind}", observed=observed, budget=limit, floor=floor, passed=passed
            )


def _summary(kind: str, values: metrics.Array) -> float:
    return float(values.max() if kind == "max" else values.mean())


def _floors(name: str, pairs: _Pairs) -> tuple[float, float]:
    """Worst and mean error of the port, over generated positions and those inside prompts."""
    function, field = metrics.FLOORED[name]
    worst, total, count = [], 0.0, 0
    for _, scores in pairs:
        if scores.port is None or scores.prompt_floor is None:
            raise ValueError("the reference has no floor for this precision: score the run again")
        errors = function(getattr(scores.reference, field), getattr(scores.port, field))
        inside = scores.prompt_floor
        worst += [float(errors.max()), inside.maximum[name]]
        total += float(errors.sum()) + inside.mean[name] * inside.positions
        count += len(errors) + inside.positions
    return float(np.max(worst)), total / count


def _greedy(pairs: _Pairs, limit: float) -> tuple[list[NearTie], list[NearTie]]:
    """Tokens that are not the reference's own: those within the limit, and those past it.

    The reference is teacher-forced over the candidate's tokens, so every position is a decision on
    the same prefix, and the tokens equal the reference's greedy decoding when no position differs.
    Without a noise floor (FP32) the limit is 0 and there are no ties.
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


def _worst(pairs: _Pairs) -> list[WorstPosition]:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness judge`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, results/<run>")
    parser.add_argument("--cell", action="append", default=[], help="only this cell; repeatable")


def run(args: argparse.Namespace) -> int:
    """Decide a run's records again, write the verdicts back, print a table and each failure."""
    try:
        header, found, faults = records.load_run(args.run)
    except records.RecordError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    unknown = sorted(set(args.cell) - set(header.cells))
    if unknown:
        known = ", ".join(header.cells)
        print(f"no such cell: {', '.join(unknown)}; {header.run} has: {known}", file=sys.stderr)
        return EXIT_USAGE
    judged = []
    for record in found:
        if args.cell and record.cell not in args.cell:
            continue
        record = record.model_copy(update={"verdict": judge(record)})
        records.save(record, args.run)
        judged.append(record)
    print(table(judged))
    for record in judged:
        if record.verdict is not None and record.verdict.verdict != "pass":
            print(f"\n{describe(record, header, args.run)}")
    faults = [] if args.cell else faults
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    verdicts = [record.verdict.verdict for record in judged if record.verdict is not None]
    return exit_code([*verdicts, *("error" for _ in faults)])
