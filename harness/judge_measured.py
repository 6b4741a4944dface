# SPDX-License-Identifier: Apache-2.0
"""Verdicts on served answers, on their times and on an engine's speed: pure functions of evidence.

An answer is judged by what every client relies on: reasoning apart from content, no markup of the
model's format in either, calls that fit their schema, and a finish reason that says what happened.
Times and speeds have no budget: they are findings, to be compared with those of another run. What is
judged is that the cell measured what it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

import jsonschema

from harness.measurements import (
    FunctionCall,
    ServedAnswer,
    ServedObservation,
    ServedStream,
    SpeedObservation,
    TimingObservation,
)
from harness.records import Finding, ReachFact, Verdict

_MARKUP = ("<think>", "</think>", "<|", "<function=", "</function>", "<parameter=", "</parameter>")

SPREAD = 0.15
"""How far the experts that a step chooses may be from what even routing gives. Drawn routers are off
by 0.01 for 32 tokens of Logos, and vLLM's dummy weights, which send all to the same four, by 0.96."""


def judge_served(observation: ServedObservation) -> Verdict:
    """Decide whether every answer has the form that its request asks for."""
    if not observation.answers:
        return Verdict(verdict="not_reached", reasons=["nothing was asked"])
    faults = [fault for answer in observation.answers for fault in _answer_faults(answer)]
    finding = Finding(
        metric="answer_faults",
        observed=float(len(faults)),
        budget=0.0,
        floor=None,
        passed=not faults,
    )
    return Verdict(verdict="fail" if faults else "pass", reasons=faults, findings=[finding])


def judge_timing(observation: TimingObservation, smoke: dict[str, Any]) -> Verdict:
    """Decide whether the streams ran as the cell says, and find their times.

    Args:
        smoke: the cell's settings of that name.
    """
    streams = observation.streams
    wanted = smoke["streams"] * smoke["rounds"]
    lengths = sorted({(one.prompt_tokens, one.completion_tokens) for one in streams})
    facts = [
        _fact("streams finished", wanted, len(streams)),
        _fact(
            "prompt and generated tokens", [(smoke["prompt_tokens"], smoke["max_tokens"])], lengths
        ),
    ]
    if not all(fact.reached for fact in facts):
        return _not_reached(facts)
    rounds: dict[int, list[ServedStream]] = {}
    for one in streams:
        rounds.setdefault(one.round, []).append(one)
    return Verdict(
        verdict="pass",
        reach=facts,
        findings=[
            _measured("decode_tok_s", median(_decode_tok_s(one) for one in rounds.values())),
            _measured("tpot_ms", median(_tpot_ms(one) for one in streams)),
            _measured("ttft_ms", median(one.first_token_ms - one.sent_ms for one in streams)),
        ],
    )


def judge_speed(observation: SpeedObservation, settings: dict[str, Any]) -> Verdict:
    """Decide whether the rounds ran as the cell says; find the speed and the limit of memory.

    Args:
        settings: the cell's.
    """
    speed, engine = settings["speed"], observation.settings
    found, expected = observation.distinct_experts
    widths = sorted({len(one.tokens) for one in observation.rounds})
    tokens = sorted({count for one in observation.rounds for count in one.tokens})
    facts = [
        _fact("dtype", settings["engine"]["args"]["dtype"], engine.dtype),
        _fact("quantization", settings["engine"]["args"].get("quantization"), engine.quantization),
        _fact("rounds", speed["rounds"], len(observation.rounds)),
        _fact("streams", [speed["streams"]], widths),
        _fact("prompt tokens", speed["prompt_tokens"], observation.prompt_tokens),
        _fact("tokens generated", [speed["max_tokens"]], tokens),
        _fact(
            "steps of a round: all streams in each",
            [speed["max_tokens"]],
            sorted({one.steps for one in observation.rounds}),
        ),
        ReachFact(
            fact="distinct experts of a layer and step",
            expected=f"{expected:.1f}, {SPREAD:.0%} either way",
            found=f"{found:.1f}",
            reached=abs(found - expected) <= SPREAD * expected,
        ),
    ]
    if not all(fact.reached for fact in facts):
        return _not_reached(facts)
    limit_ms = 1e3 * observation.bytes_moved / observation.copy_bytes_s
    if speed["phase"] == "decode":
        step_ms = median(
            (one.last_token_ms - one.first_token_ms) / (speed["max_tokens"] - 1)
            for one in observation.rounds
        )
        times = [
            _measured("decode_tok_s", 1e3 * speed["streams"] / step_ms),
            _measured("tpot_ms", step_ms),
        ]
    else:
        step_ms = median(one.first_token_ms for one in observation.rounds)
        times = [
            _measured("prefill_tok_s", 1e3 * speed["prompt_tokens"] / step_ms),
            _measured("ttft_ms", step_ms),
        ]
    return Verdict(
        verdict="pass",
        reach=facts,
        findings=[
            *times,
            _measured("memory_limit_ms", limit_ms),
            _measured("memory_limit_share", limit_ms / step_ms),
            _measured("memory_gib", observation.memory_bytes / 2**30),
            _measured("startup_s", observation.startup_s),
            _measured("copy_tb_s", observation.copy_bytes_s / 1e12),
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


def _measured(metric: str, value: float) -> Finding:
    return Finding(metric=metric, observed=value, budget=None, floor=None, passed=True)


def _fact(name: str, expected: object, found: object) -> ReachFact:
    return ReachFact(fact=name, expected=str(expected), found=str(found), reached=expected == found)


def _not_reached(facts: list[ReachFact]) -> Verdict:
    missed = [fact for fact in facts if not fact.reached]
    reasons = [f"{fact.fact}: expected {fact.expected}, found {fact.found}" for fact in missed]
    return Verdict(verdict="not_reached", reasons=reasons, reach=facts)
