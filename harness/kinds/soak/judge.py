# SPDX-License-Identifier: Apache-2.0
"""The verdict on a soak: a pure function of its evidence and of the limits that its cell sets.

`flat` means that the median of the last third of the traffic's time is not above that of the second
third by more than the cell's factor. The first third is left out: there caches fill, and memory grows
as it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from harness.evidence.verdict import Finding, ReachFact, Verdict, VerdictName
from harness.judging.findings import at_least, measured, missed, none_expected
from harness.kinds.soak.observation import Sample, SoakObservation
from harness.kinds.soak.settings import GOOD_KINDS, Clients, Limits

FEWEST_SAMPLES = 5

_TINY = 1e-9  # a median of 0 must not end the judging
_FLAT: dict[str, Callable[[Sample], float | None]] = {  # by the limit's name in the matrix
    "rss_growth": lambda sample: sample.rss_bytes,
    "card_growth": lambda sample: sample.card_bytes,
    "ttft_growth": lambda sample: sample.ttft_ms,
    "itl_growth": lambda sample: sample.itl_ms,
}


def judge(
    observation: SoakObservation, soak: Clients, fewest_samples: int = FEWEST_SAMPLES
) -> Verdict:
    """Decide whether every answer was right and the server the same after the traffic as before.

    Args:
        fewest_samples: of a third, at least, for its median to say anything.
    """
    findings = [
        none_expected("different_answers", observation.different + observation.unstable),
        none_expected("soak_errors", observation.error_count),
        none_expected("orphans", len(observation.orphans)),
    ]
    reasons = [
        f"{finding.metric} {finding.observed:.0f}, expected none"
        for finding in findings
        if not finding.passed
    ]
    reasons += [f"{one.request}, {one.when}: another answer" for one in observation.differences]
    reasons += observation.errors
    reasons += [f"outlived the server: {process}" for process in observation.orphans]
    if not observation.healthy:
        reasons.append("the server was not healthy when the traffic was over")
    if not observation.stopped:
        reasons.append("the server did not stop in time")
    growths = list(_growths(observation.samples, soak, fewest_samples))
    reasons += [
        f"{growth.metric} {growth.observed:.3g} is past its limit {growth.budget:.3g}"
        for growth in growths
        if not growth.passed
    ]
    findings += [*growths, *_figures(observation)]
    facts = list(_facts(observation, soak, fewest_samples))
    unreached = missed(facts)
    verdict: VerdictName = "fail" if reasons else "not_reached" if unreached else "pass"
    return Verdict(verdict=verdict, reasons=[*reasons, *unreached], findings=findings, reach=facts)


def _facts(observation: SoakObservation, soak: Clients, fewest_samples: int) -> Iterator[ReachFact]:
    """Yield what the traffic must have been for the answers to prove anything."""
    least = soak.at_least
    yield at_least("seconds of traffic", soak.duration_s, observation.run_s)
    yield at_least("requests open at once", least.in_flight, observation.peak_in_flight)
    running = max((sample.running for sample in observation.samples), default=0)
    yield at_least("requests running at once", least.running, running)
    for kind in soak.mix:
        counts = observation.requests[kind]
        what = "completed" if kind in GOOD_KINDS else "refused" if kind == "bad" else "left"
        yield at_least(f"{kind}: {what}", least.of_a_kind, getattr(counts, what))
    for name, counter in (("preemptions", "num_preemptions"), ("hits", "prefix_cache_hits")):
        yield at_least(name, getattr(least, name), observation.counters[f"vllm:{counter}"])
    busy = sum(count > 0 for count in observation.finished_by_engine.values())
    yield at_least("engines that finished requests", least.engines, busy)
    for name in Limits.model_fields:
        for third, values in zip(("second", "last"), _series(name, observation.samples, soak)):  # noqa: B905
            yield at_least(f"{name}: samples of the {third} third", fewest_samples, len(values))


def _series(name: str, samples: list[Sample], soak: Clients) -> list[list[float]]:
    """Return a figure in the second and in the last third of the time that clients asked.

    Nothing at all where it has no meaning: a card's memory where there is no card.
    """
    third = soak.duration_s / 3
    if name == "card_growth" and all(sample.card_bytes is None for sample in samples):
        return []
    return [
        [
            value
            for sample in samples
            if begin <= sample.t_s < begin + third and (value := _FLAT[name](sample)) is not None
        ]
        for begin in (third, 2 * third)
    ]


def _growths(samples: list[Sample], soak: Clients, fewest_samples: int) -> Iterator[Finding]:
    """Yield the last third over the second of each figure that the cell limits and that is there."""
    for name, limit in soak.limits:
        series = _series(name, samples, soak)
        if series and all(len(values) >= fewest_samples for values in series):
            before, after = map(median, series)
            growth = after / max(before, _TINY)
            yield Finding(
                metric=name, observed=growth, budget=limit, floor=None, passed=growth <= limit
            )


def _figures(observation: SoakObservation) -> Iterator[Finding]:
    """Yield the figures that a report shows and no budget decides."""
    figures = {
        "completed": sum(counts.completed for counts in observation.requests.values()),
        "in_flight": observation.peak_in_flight,
        "preemptions": observation.counters["vllm:num_preemptions"],
        "served_tok_s": observation.completion_tokens / observation.run_s,
    }
    late = observation.minutes[-1] if observation.minutes else None
    for name in ("ttft", "itl"):
        times = getattr(late, f"{name}_ms") if late else None
        if times is not None:
            figures[f"{name}_p99_ms"] = times.p99
    for name, value in figures.items():
        yield measured(name, value)
