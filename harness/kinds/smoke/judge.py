# SPDX-License-Identifier: Apache-2.0
"""The verdict on a smoke cell: on prompts' logprobs, on served answers, or on their times.

An answer is judged by what every client relies on: reasoning apart from content, no markup of the
model's format in either, calls that fit their schema, and a finish reason that says what happened.
Times have no budget: they are findings, to be compared with those of another run. What is judged is
that the cell measured what it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

import jsonschema

from harness.evidence.record import Record
from harness.evidence.scores import Reference
from harness.evidence.verdict import ReachFact, Verdict
from harness.judging import agreement, sameness, tolerance
from harness.judging.findings import error, fact, measured, missed, none_expected, not_reached
from harness.kinds.smoke.observation import (
    FunctionCall,
    PromptObservation,
    ServedAnswer,
    ServedObservation,
    ServedStream,
    TimingObservation,
)
from harness.kinds.smoke.settings import ParityCheck, SmokeSettings, TimingCheck

_MARKUP = ("<think>", "</think>", "<|", "<function=", "</function>", "<parameter=", "</parameter>")
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def judge(settings: SmokeSettings, record: Record[Any]) -> Verdict:
    """Decide on whichever of the three the cell observed."""
    observation = record.observation
    if isinstance(observation, PromptObservation):
        verdict = judge_prompts(observation, record.reference)
        return _repeated(verdict, settings, observation)
    if isinstance(observation, ServedObservation):
        return judge_served(observation)
    if isinstance(observation, TimingObservation) and isinstance(settings.smoke, TimingCheck):
        return judge_timing(observation, settings.smoke)
    return error(f"a cell that checks {settings.smoke.check} observed times")


def judge_prompts(observation: PromptObservation, reference: Reference | None) -> Verdict:
    """Decide on the logprobs of prompts: their tokens are given, so none can be the wrong one."""
    if reference is None or len(reference.requests) != len(observation.prompts):
        return error("the record lacks reference scores of prompts")
    facts = observation.settings
    if facts.dtype not in _PRECISIONS:
        return error(f"no precision is known for an engine in {facts.dtype}")
    precision = tolerance.precision(_PRECISIONS[facts.dtype])
    pairs = list(zip(observation.prompts, reference.requests, strict=True))
    try:
        found = list(agreement.findings(precision, pairs, "prompt"))
    except agreement.Unscored as fault:
        return error(str(fault))
    reasons = agreement.past_budget(found)
    verdict = Verdict(
        verdict="fail" if reasons else "pass",
        reasons=reasons,
        findings=found,
        worst=agreement.worst(precision, pairs),
    )
    if facts.quantization is None:
        return verdict
    why = f"the floor is BF16's, and the engine has {facts.quantization}"
    return agreement.measured_only(verdict, why)


def _repeated(verdict: Verdict, settings: SmokeSettings, observation: PromptObservation) -> Verdict:
    """Also hold rounds that were asked several times to what they must be."""
    check, workload, again = settings.smoke, settings.workload, observation.repetitions
    if not isinstance(check, ParityCheck) or workload is None or verdict.verdict == "error":
        return verdict
    prefilled = {one.prompt: len(one.token_ids) for one in observation.prompts}
    facts: list[ReachFact] = []
    for number, round_ in enumerate(workload.rounds):
        rows = [
            (check.max_tokens or 0) + (prefilled[name] if round_.prompt_rows else 0)
            for name in round_.prompts
        ]
        facts += sameness.reach(number, round_.times, sum(rows), again)
    if missed(facts):
        return not_reached(facts)
    return sameness.judged(verdict.model_copy(update={"reach": facts}), again, workload.spread)


def judge_served(observation: ServedObservation) -> Verdict:
    """Decide whether every answer has the form that its request asks for."""
    if not observation.answers:
        return Verdict(verdict="not_reached", reasons=["nothing was asked"])
    faults = [fault for answer in observation.answers for fault in _answer_faults(answer)]
    finding = none_expected("answer_faults", len(faults))
    return Verdict(verdict="fail" if faults else "pass", reasons=faults, findings=[finding])


def judge_timing(observation: TimingObservation, check: TimingCheck) -> Verdict:
    """Decide whether the streams ran as the cell says, and find their times."""
    streams = observation.streams
    lengths = sorted({(one.prompt_tokens, one.completion_tokens) for one in streams})
    facts = [
        fact("streams finished", check.streams * check.rounds, len(streams)),
        fact("prompt and generated tokens", [(check.prompt_tokens, check.max_tokens)], lengths),
    ]
    if missed(facts):
        return not_reached(facts)
    rounds: dict[int, list[ServedStream]] = {}
    for one in streams:
        rounds.setdefault(one.round, []).append(one)
    return Verdict(
        verdict="pass",
        reach=facts,
        findings=[
            measured("decode_tok_s", median(_decode_tok_s(one) for one in rounds.values())),
            measured("tpot_ms", median(_tpot_ms(one) for one in streams)),
            measured("ttft_ms", median(one.first_token_ms - one.sent_ms for one in streams)),
        ],
    )


def _answer_faults(answer: ServedAnswer) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with an answer."""
    name = f"{answer.prompt}, {'streamed' if answer.streamed else 'whole'}"
    if answer.enable_thinking and not (answer.reasoning or "").strip():
        yield f"{name}: no reasoning in thinking mode"
    if not answer.enable_thinking and answer.reasoning:
        yield f"{name}: reasoning in direct mode: {answer.reasoning[:80]!r}"
    for field in ("reasoning", "content"):
        text = getattr(answer, field) or ""
        yield from (f"{name}: {markup} in the {field}" for markup in _MARKUP if markup in text)
    calls = bool(answer.tools) and not answer.after_tool_result
    finish = "tool_calls" if calls else "stop"
    if answer.finish_reason != finish:
        tokens = answer.completion_tokens
        yield f"{name}: finish_reason {answer.finish_reason} after {tokens} tokens, expected {finish}"
    if calls and not answer.tool_calls:
        yield f"{name}: no tool call"
    if not calls and answer.tool_calls:
        yield f"{name}: an unexpected call of {answer.tool_calls[0].name}"
    if not calls and not (answer.content or "").strip():
        yield f"{name}: no content"
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in answer.tools
    }
    for call in answer.tool_calls:
        yield from (f"{name}: {fault}" for fault in _call_faults(call, schemas))


def _call_faults(call: FunctionCall, schemas: dict[str, Any]) -> Iterator[str]:
    if call.name not in schemas:
        yield f"call of {call.name}, which is none of {', '.join(schemas) or 'no tools'}"
        return
    try:
        arguments = json.loads(call.arguments)
    except json.JSONDecodeError as error:
        yield f"arguments of {call.name} are not JSON ({error}): {call.arguments[:80]!r}"
        return
    validator = jsonschema.Draft202012Validator(schemas[call.name])
    for misfit in validator.iter_errors(arguments):
        yield f"arguments of {call.name} do not fit the schema: {misfit.message}"


def _tpot_ms(stream: ServedStream) -> float:
    return (stream.last_token_ms - stream.first_token_ms) / (stream.completion_tokens - 1)


def _decode_tok_s(streams: list[ServedStream]) -> float:
    """Tokens after each stream's first, over the time in which they came."""
    tokens = sum(one.completion_tokens - 1 for one in streams)
    began = min(one.first_token_ms for one in streams)
    return 1e3 * tokens / (max(one.last_token_ms for one in streams) - began)
