# SPDX-License-Identifier: Apache-2.0
"""Where a failed cell deviates: from which token on, and what the requests that do have met."""

import math

import pytest

from harness.evidence.verdict import Finding, NearTie, Verdict
from harness.kinds.parity.explain import deviations
from tests import evidence

EXACT = evidence.request("p").logprobs
RIGHT = [0.0, 0.0, 0.0]


def request(index: int = 0, errors: list[float] = RIGHT, round_: int = 0, **changes):
    """A request of three tokens whose logprobs are off by `errors`."""
    logprobs = [exact + error for exact, error in zip(EXACT, errors, strict=True)]
    return evidence.request("p", index=index, round_=round_, logprobs=logprobs, **changes)


def lines(*requests, schedules=("alone",), argmax=(10, 11, 12), near_ties=(), passed=False):
    """What is said of these requests, whose cell has a budget of 1e-4 nats."""
    figure = Finding(
        metric="decode_logprob_error_max", observed=1, budget=1e-4, floor=None, passed=passed
    )
    pair = evidence.pair(evidence.scores(argmax=list(argmax)))
    record = evidence.record(
        settings=evidence.settings(
            workload={
                "rounds": [
                    {"schedule": schedule, "cached": "any", "prompts": ["p"]}
                    for schedule in schedules
                ]
            }
        ),
        observation=evidence.observation(requests=list(requests)),
        reference=evidence.reference(*[pair] * len(requests)),
        verdict=Verdict(verdict="fail", findings=[figure], near_ties=list(near_ties)),
    )
    return deviations(record)


def test_a_cell_that_agrees_deviates_nowhere():
    assert lines(request(), passed=True) == []


def test_a_fault_of_the_prefill_shows_in_the_first_token():
    assert lines(request(0, [0.5, 0, 0.3]), request(1, [0.4, 0, 0])) == [
        "deviates at 3 of 6 positions, there by 0.4 nats in the median",
        "  from the first token (prefill): 2 of 2 requests",
    ]


def test_a_fault_of_decoding_leaves_the_first_token_right():
    assert lines(request(0, [0, 0, 0.5]), request(1, [0.5, 0, 0])) == [
        "deviates at 2 of 6 positions, there by 0.5 nats in the median",
        "  from the first token (prefill): 1 of 2 requests",
        "  from token 3 or later, the first one right (decoding): 1 of 2 requests",
    ]


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({"num_cached_tokens": 16}, "a prefix-cache hit"),
        ({"num_preemptions": 1}, "a preemption"),
        ({"round_": 1}, "an earlier round"),
    ],
)
def test_what_the_deviating_requests_met_and_no_others_is_named(changes, met):
    wrong = request(1, [0.5, 0, 0], **changes)
    found = lines(request(0), wrong, schedules=("alone", "alone"))
    assert (
        found[1] == f"  from the first token (prefill): 1 of 2 requests, exactly those with {met}"
    )


def test_company_in_the_batch_is_named():
    found = lines(request(0), request(0, [0.5, 0, 0], round_=1), schedules=("alone", "batched"))
    # An earlier round fits as well; what explains as much and was met as seldom comes first.
    assert found[1].endswith("1 of 2 requests, exactly those with company in the batch")


def test_what_others_met_too_only_narrows_it():
    hit = {"num_cached_tokens": 16}
    found = lines(request(0), request(1, [0.5, 0, 0], **hit), request(2, **hit))
    assert found[1].endswith("1 of 3 requests, only those with a prefix-cache hit")


def test_what_every_request_met_explains_nothing():
    hit = {"num_cached_tokens": 16}
    assert lines(request(0, [0.5, 0, 0], **hit), request(1, **hit))[1].endswith("1 of 2 requests")


def test_a_logprob_that_is_no_number_deviates():
    assert lines(request(0, [0, math.nan, 0])) == [
        "deviates at 1 of 3 positions, there by inf nats in the median",
        "  from token 2 or later, the first one right (decoding): 1 of 1 requests",
    ]


def test_another_token_deviates_unless_it_passed_as_a_tie():
    tie = NearTie(
        request="0.0-p",
        position=1,
        token_id=11,
        reference_token_id=60,
        margin_nats=0.1,
        limit_nats=0.2,
    )
    assert "from token 2 or later" in lines(request(), argmax=(10, 60, 12))[1]
    assert lines(request(), argmax=(10, 60, 12), near_ties=[tie], passed=True) == []


def test_a_cell_whose_means_alone_are_past_their_budgets_says_so():
    assert lines(request()) == ["no logprob alone is past its budget: see the figures marked <-"]


def test_a_cell_without_evidence_deviates_nowhere():
    assert deviations(evidence.record(observation=None, verdict=Verdict(verdict="error"))) == []
