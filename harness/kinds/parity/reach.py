# SPDX-License-Identifier: Apache-2.0
"""Did the cell run what its name claims?

A parity cell that never hit the prefix cache, never split a prompt or never preempted a request
agrees with the reference and proves nothing. So each claim of a cell is checked first, against
public counters only: the engine's resolved configuration, `num_cached_tokens`, and the scheduler's
own account of each step. A claim that does not hold makes the cell `not_reached`, which fails the
run.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.evidence.engine import EngineFacts
from harness.evidence.verdict import ReachFact
from harness.judging import sameness
from harness.judging.findings import at_least, fact
from harness.judging.tolerance import precision
from harness.kinds.parity.observation import EngineObservation, RequestObservation, Step
from harness.kinds.parity.settings import ParitySettings

_RESOLVED = (  # engine arguments whose resolved value is part of the claim when a cell sets them
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_prefix_caching",
    "tensor_parallel_size",
    "enable_expert_parallel",
    "async_scheduling",
    "enforce_eager",
)


def check(settings: ParitySettings, observation: EngineObservation) -> list[ReachFact]:
    """Every claim of a parity cell with what was found.

    Args:
        settings: the cell's.
        observation: what the engine child wrote.
    """
    facts = list(_configuration(settings, observation.facts))
    facts += _outputs(settings, observation.requests)
    for number, round_ in enumerate(settings.workload.rounds):
        requests = [request for request in observation.requests if request.round == number]
        steps = [step for step in observation.steps if step.round == number]
        facts.append(_cached_tokens(number, round_.cached, requests, observation.facts.block_size))
        facts += _schedule(number, round_.schedule, requests, steps, settings)
        if round_.schedule == "alone" and round_.cached == "none":
            facts += _prefill(number, settings.reach.prefill, requests, steps)
        rows = sum(len(request.token_ids) for request in requests)
        if round_.prompt_rows:
            rows += sum(request.num_prompt_tokens - 1 for request in requests)
        facts += sameness.reach(number, round_.times, rows, observation.repetitions)
    facts.append(_preemptions(settings.reach.preemptions, observation.steps))
    facts.append(_graphs(settings.reach.cudagraphs, observation.steps))
    return facts


def _configuration(settings: ParitySettings, facts: EngineFacts) -> Iterator[ReachFact]:
    reach, args = settings.reach, settings.engine.args
    yield fact("dtype", precision(settings.precision).dtype, facts.dtype)
    for key in ("mamba_ssm_cache_dtype", "mamba_cache_mode", "quantization"):
        yield fact(key, getattr(reach, key), getattr(facts, key))
    allocated = facts.cache_tensor_dtypes.get("ssm", [])
    yield fact("allocated SSM state", [reach.mamba_ssm_cache_dtype], allocated)
    for key in _RESOLVED:
        if key in args:
            yield fact(key, args[key], getattr(facts, key))
    if reach.cudagraphs != "NONE" and facts.generated_kernels is not None:
        yield at_least("generated kernels read", 1, facts.generated_kernels)


def _outputs(settings: ParitySettings, requests: list[RequestObservation]) -> Iterator[ReachFact]:
    wanted = [
        (number, name)
        for number, round_ in enumerate(settings.workload.rounds)
        for name in round_.prompts
    ]
    found = [(request.round, request.prompt) for request in requests]
    yield fact("requests finished", len(wanted), len(found), sorted(wanted) == sorted(found))
    if settings.sampling.ignore_eos:
        lengths = sorted({len(request.token_ids) for request in requests})
        yield fact("tokens generated", [settings.sampling.max_tokens], lengths)


def _cached_tokens(
    number: int, claim: str, requests: list[RequestObservation], block_size: int | None
) -> ReachFact:
    """The hits of a round: whole blocks always, as many as the schema says of the claim."""
    name = f"round {number}: num_cached_tokens"
    found = [request.num_cached_tokens for request in requests]
    if claim == "none":
        return fact(name, [0] * len(found), found)
    if block_size is None:
        return fact(name, "the engine's block size", None, False)
    on_boundaries = all(tokens % block_size == 0 for tokens in found)
    if claim == "any":
        return fact(name, f"multiples of {block_size}", found, on_boundaries)
    if claim == "some":
        return fact(
            name, f"multiples of {block_size}, one above 0", found, on_boundaries and any(found)
        )
    expected = [(request.num_prompt_tokens - 1) // block_size * block_size for request in requests]
    return fact(name, f"{expected}, one above 0", found, found == expected and any(found))


def _schedule(
    number: int,
    claim: str,
    requests: list[RequestObservation],
    steps: list[Step],
    settings: ParitySettings,
) -> Iterator[ReachFact]:
    largest = max((step.prefill_requests + step.decode_requests for step in steps), default=0)
    name = f"round {number}: largest batch"
    if claim == "alone":
        yield fact(name, 1, largest)
    elif claim == "arrivals":
        joined = any(step.prefill_requests and step.decode_requests for step in steps)
        yield fact(f"round {number}: prefill beside decode", True, joined)
    elif settings.reach.preemptions == "some":
        yield fact(name, "above 1", largest, largest > 1)
    else:
        yield fact(name, len(requests), largest)


def _prefill(
    number: int, claim: str | int, requests: list[RequestObservation], steps: list[Step]
) -> Iterator[ReachFact]:
    """The chunks that the scheduler cut, for requests that ran one after another."""
    if claim == "blocks":  # align mode cuts at block boundaries as well; the hits prove those
        return
    found = [step.prefill_tokens for step in steps if step.prefill_tokens]
    expected = []
    for request in requests:
        length = request.num_prompt_tokens
        size = length if claim == "whole" else int(claim)
        expected += [min(size, length - start) for start in range(0, length, size)]
    yield fact(f"round {number}: prefill chunks", expected, found)
    if claim != "whole":
        yield fact(f"round {number}: a prompt was split", True, len(found) > len(requests))


def _preemptions(claim: str, steps: list[Step]) -> ReachFact:
    count = sum(step.preempted_requests for step in steps)
    expected = "none" if claim == "none" else "at least 1"
    return fact("preemptions", expected, count, (count == 0) == (claim == "none"))


def _graphs(claim: str, steps: list[Step]) -> ReachFact:
    modes = sorted({step.cudagraph_runtime_mode or "NONE" for step in steps})
    reached = modes == ["NONE"] if claim == "NONE" else claim in modes
    return fact("CUDA graphs replayed", claim, modes, reached)
