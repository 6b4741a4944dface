# SPDX-License-Identifier: Apache-2.0
"""Where a parity cell deviates, which tells faults apart.

A prefill that went wrong shows in the first token, a state or cache that decoding reads shows from
the second on, and a fault of one feature of the engine shows only in requests that met it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.judging import agreement, metrics, sameness, tolerance
from harness.judging.numbers import number
from harness.kinds.kind import Table, settings_table
from harness.kinds.parity.observation import EngineObservation, RequestObservation
from harness.kinds.parity.settings import ParitySettings
from harness.kinds.settings import Workload

_Met = Callable[[RequestObservation, Workload], bool]
_MET: dict[str, _Met] = {  # what a request may have met in the engine; the workload is its cell's
    "a prefix-cache hit": lambda request, _: request.num_cached_tokens > 0,
    "a preemption": lambda request, _: request.num_preemptions > 0,
    "company in the batch": lambda request, load: load.rounds[request.round].schedule != "alone",
    "an earlier round": lambda request, _: request.round > 0,
}


def deviations(record: Record[EngineObservation]) -> list[str]:
    """Return which requests deviate, from which token on, and what they and no others met."""
    observation, verdict = record.observation, record.verdict
    if observation is None or verdict is None:
        return []
    found = _deviations(record, observation, verdict)
    if not found:
        own = [finding for finding in verdict.findings if finding.metric not in sameness.METRICS]
        failed = any(not finding.passed for finding in own)
        return ["no logprob alone is past its budget: see the figures marked <-"] if failed else []
    errors = [error for positions in found.values() for error in positions.values()]
    total = sum(len(request.token_ids) for request in observation.requests)
    first = [name for name, positions in found.items() if 0 in positions]
    later = [name for name in found if name not in first]
    median = number(statistics.median(errors))
    lines = [
        f"deviates at {len(errors)} of {total} positions, there by {median} nats in the median"
    ]
    if first:
        lines.append(f"  from the first token (prefill): {_named(first, record, observation)}")
    if later:
        earliest = min(min(found[name]) for name in later)
        lines.append(
            f"  from token {earliest + 1} or later, the first one right (decoding): "
            f"{_named(later, record, observation)}"
        )
    return lines


def circumstances(record: Record[EngineObservation]) -> list[str]:
    """Return what each request had from the prefix cache."""
    if record.observation is None:
        return []
    hits = [
        f"{one.id} {one.num_cached_tokens}/{one.num_prompt_tokens}"
        for one in record.observation.requests
    ]
    return [f"cached tokens: {', '.join(hits)}"]


def figures(record: Record[EngineObservation]) -> Iterator[tuple[str, float]]:
    """Yield what a record holds beside its findings: hits, ties, noise and times."""
    if record.observation is None:
        return
    requests = record.observation.requests
    yield "cached_tokens", sum(request.num_cached_tokens for request in requests)
    if record.reference is not None and record.verdict and record.verdict.findings:
        yield "near_ties", len(record.verdict.near_ties)
        exact = [
            value for scores in record.reference.requests for value in scores.reference.logprobs
        ]
        observed = [value for request in requests for value in request.logprobs]
        yield "sqnr_db", metrics.logprob_sqnr_db(exact, observed)
    first = [request.ttft_ms for request in requests if request.ttft_ms is not None]
    if first:
        yield "ttft_ms", float(np.mean(first))
    between = [
        (request.e2el_ms - request.ttft_ms) / (len(request.token_ids) - 1)
        for request in requests
        if request.e2el_ms is not None
        and request.ttft_ms is not None
        and len(request.token_ids) > 1
    ]
    if between:
        yield "tpot_ms", float(np.mean(between))


def tables(record: Record[EngineObservation]) -> list[Table]:
    """Return the requests, and the engine's resolved settings."""
    if record.observation is None:
        return []
    heads = ["request", "prompt", "cached", "generated", "preempted", "TTFT ms", "E2EL ms"]
    requests = [
        [
            one.id,
            *map(str, (one.num_prompt_tokens, one.num_cached_tokens, len(one.token_ids))),
            str(one.num_preemptions),
            number(one.ttft_ms),
            number(one.e2el_ms),
        ]
        for one in record.observation.requests
    ]
    return [Table("Requests", heads, requests), settings_table(record.observation.facts)]


def _deviations(
    record: Record[EngineObservation], observation: EngineObservation, verdict: Verdict
) -> dict[str, dict[int, float]]:
    """Logprob error by position, of each request with a position past its own budget.

    A token that is not the reference's own counts too, unless it passed as a near tie.
    """
    settings = ParitySettings.recorded(record.settings)
    if not verdict.findings or record.reference is None:
        return {}
    pairs = list(zip(observation.requests, record.reference.requests, strict=True))
    past = agreement.past_positions(tolerance.precision(settings.precision), pairs)
    ties = {(tie.request, tie.position) for tie in verdict.near_ties}
    found: dict[str, dict[int, float]] = {}
    for request, scores in pairs:
        for position, token in enumerate(request.token_ids):
            place = (request.id, position)
            if place in past or (token != scores.reference.argmax[position] and place not in ties):
                error = abs(request.logprobs[position] - scores.reference.logprobs[position])
                found.setdefault(request.id, {})[position] = past.get(place, error)
    return found


def _named(
    names: Sequence[str], record: Record[EngineObservation], observation: EngineObservation
) -> str:
    """Requests by their count, and what they met if only they did, or else they among others."""
    requests = {request.id: request for request in observation.requests}
    text = f"{len(names)} of {len(requests)} requests"
    workload = ParitySettings.recorded(record.settings).workload
    met = {
        what: {name for name, request in requests.items() if has(request, workload)}
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
