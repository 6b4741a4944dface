# SPDX-License-Identifier: Apache-2.0
"""Reach: each claim of a cell fails alone when the run was another one."""

import pytest

from harness.kinds.parity import reach
from harness.kinds.parity.settings import ParitySettings
from tests import evidence
from tests.evidence import prefill_step, request, step


def missed(observation, **changes):
    settings = ParitySettings.model_validate(evidence.settings(**changes))
    facts = reach.check(settings, observation)
    return [fact.fact for fact in facts if not fact.reached]


def claims(**changes):
    return evidence.settings()["reach"] | changes


def rounds(*found):
    return {"rounds": [dict(round_) for round_ in found]}


ALONE = {"schedule": "alone", "cached": "none", "prompts": ["p"]}


def test_what_ran_as_claimed_is_reached():
    assert missed(evidence.observation()) == []


@pytest.mark.parametrize(
    ("resolved", "fact"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"mamba_ssm_cache_dtype": "auto"}, "mamba_ssm_cache_dtype"),
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode"),
        ({"quantization": "fp8"}, "quantization"),
        ({"cache_tensor_dtypes": {"ssm": ["bfloat16"]}}, "allocated SSM state"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
    ],
)
def test_a_setting_resolved_otherwise_is_not_reached(resolved, fact):
    facts = evidence.engine_facts({}, **resolved)
    assert missed(evidence.observation(facts=facts)) == [fact]


def test_a_request_that_did_not_run_is_not_reached():
    assert "requests finished" in missed(evidence.observation(requests=[]))


def test_fewer_tokens_than_asked_for_are_not_reached():
    observation = evidence.observation(requests=[request("p", tokens=2)])
    assert missed(observation) == ["tokens generated"]


def test_a_hit_in_a_cold_cell_is_not_reached():
    observation = evidence.observation(requests=[request("p", num_cached_tokens=16)])
    assert missed(observation) == ["round 0: num_cached_tokens"]


@pytest.mark.parametrize(
    ("length", "cached", "hit"),
    [
        (20, 16, True),
        (20, 0, False),
        (20, 8, False),
        (32, 16, True),
        (32, 32, False),
        (16, 0, False),
    ],
)
def test_a_repeat_must_hit_every_whole_block_before_the_last_token(length, cached, hit):
    found = request("p", length=length, num_cached_tokens=cached)
    repeat = ALONE | {"cached": "repeat"}
    facts = missed(evidence.observation(requests=[found]), workload=rounds(repeat))
    assert (facts == []) == hit


def test_some_hits_need_one_above_zero_and_all_on_boundaries():
    some = ALONE | {"cached": "some", "prompts": ["p", "q"]}
    for cached, hit in ((16, True), (0, False), (17, False)):
        requests = [request("p"), request("q", index=1, num_cached_tokens=cached)]
        facts = missed(evidence.observation(requests=requests), workload=rounds(some))
        assert ("round 0: num_cached_tokens" not in facts) == hit


def test_any_hits_need_boundaries_only():
    any_ = ALONE | {"cached": "any"}
    for cached, reached in ((0, True), (16, True), (17, False)):
        found = evidence.observation(requests=[request("p", num_cached_tokens=cached)])
        assert (missed(found, workload=rounds(any_)) == []) == reached


def test_chunks_are_compared_one_by_one():
    settings = {"reach": claims(prefill=8)}
    chunks = [prefill_step(8), prefill_step(8), prefill_step(4), step()]
    assert missed(evidence.observation(steps=chunks), **settings) == []
    aligned = [prefill_step(16), prefill_step(4), step()]
    assert "round 0: prefill chunks" in missed(evidence.observation(steps=aligned), **settings)


def test_a_chunk_that_no_prompt_exceeds_is_not_reached():
    facts = missed(evidence.observation(), reach=claims(prefill=32))
    assert facts == ["round 0: a prompt was split"]


def test_a_batch_that_ran_one_by_one_is_not_reached():
    batched = rounds({"schedule": "batched", "cached": "none", "prompts": ["p", "q"]})
    requests = [request("p"), request("q", index=1)]
    one_by_one = evidence.observation(requests=requests)
    assert missed(one_by_one, workload=batched) == ["round 0: largest batch"]
    together = evidence.observation(requests=requests, steps=[step(decode_requests=2)])
    assert missed(together, workload=batched) == []


def test_arrivals_must_meet_requests_that_decode():
    arrivals = {"schedule": "arrivals", "cached": "none", "prompts": ["p"], "arrive_every_steps": 1}
    apart = evidence.observation()
    assert missed(apart, workload=rounds(arrivals)) == ["round 0: prefill beside decode"]
    mixed = evidence.observation(steps=[prefill_step(20, decode_requests=1, decode_tokens=1)])
    assert missed(mixed, workload=rounds(arrivals)) == []


@pytest.mark.parametrize(
    ("claim", "count", "reached"),
    [("none", 0, True), ("none", 1, False), ("some", 0, False), ("some", 2, True)],
)
def test_preemptions_are_counted(claim, count, reached):
    steps = [prefill_step(20), step(preempted_requests=count)]
    facts = missed(evidence.observation(steps=steps), reach=claims(preemptions=claim))
    assert ("preemptions" not in facts) == reached


@pytest.mark.parametrize(
    ("claim", "modes", "reached"),
    [
        ("NONE", [None, "NONE"], True),
        ("NONE", ["FULL"], False),
        ("FULL", ["NONE", "FULL"], True),
        ("FULL", ["PIECEWISE"], False),
        ("PIECEWISE", ["PIECEWISE", "FULL"], True),
    ],
)
def test_graphs_are_what_the_steps_replayed(claim, modes, reached):
    steps = [prefill_step(20), *(step(cudagraph_runtime_mode=mode) for mode in modes)]
    facts = missed(evidence.observation(steps=steps), reach=claims(cudagraphs=claim))
    assert ("CUDA graphs replayed" not in facts) == reached


def test_a_compiled_engine_whose_kernels_could_not_be_read_is_not_reached():
    facts = evidence.engine_facts({}, generated_kernels=0)
    graph = step(cudagraph_runtime_mode="FULL")
    observation = evidence.observation(facts=facts, steps=[prefill_step(3), graph])
    assert "generated kernels read" in missed(observation, reach=claims(cudagraphs="FULL"))
