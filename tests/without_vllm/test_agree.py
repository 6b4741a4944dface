# SPDX-License-Identifier: Apache-2.0
"""Cells that met one prompt are held against each other: the one that stands alone is named."""

import argparse

import pytest

from harness.records import agree, judge, store
from tests import evidence


def record(cell, off=0.0, **changes):
    """A BF16 cell whose second logprob is off; references are off by 0.05 there."""
    exact, request = evidence.scores(), evidence.request("p")
    port = evidence.scores(
        logprobs=[value + 0.05 for value in exact.logprobs],
        top_logprobs=[[first + 0.05, *rest] for first, *rest in exact.top_logprobs],
    )
    request.top_logprobs[1][0] += off
    request.logprobs[1] += off
    settings = evidence.settings(
        precision="bf16", engine={"args": {"dtype": "bfloat16"}, "env": {}}
    )
    return evidence.record(
        cell=cell,
        settings=settings,
        observation=evidence.observation(
            requests=[request], facts=evidence.engine_facts({"dtype": "bfloat16"})
        ),
        reference=evidence.reference(evidence.pair(exact, port)),
        **changes,
    )


# The budget of the position: 2 * 0.05 and a step of 0.03125.
@pytest.mark.parametrize(("off", "odd"), [(0.13, []), (0.14, ["c"]), (-0.14, ["c"])])
def test_a_request_that_no_other_cell_is_near_is_named(off, odd):
    found = agree.odd_ones([record("a"), record("b"), record("c", off)])
    assert [one.cell for one in found] == odd
    if odd:
        assert "c: 0.0-p[1] is 0.14 nats from the nearest of 2 other cells" in str(found[0])


def test_two_camps_are_two_right_roundings():
    found = [record("a"), record("b"), record("c", 0.5), record("d", 0.5)]
    assert agree.odd_ones(found) == []


def test_of_two_cells_neither_is_the_odd_one():
    assert agree.odd_ones([record("a"), record("b", 0.5)]) == []


def test_only_the_same_prompt_and_checkpoint_is_compared():
    other = evidence.Corpus(sha256="d" * 64, token_ids={"p": list(range(1, 21))})
    found = [record("a"), record("b"), record("c", 0.5, corpus=other)]
    assert agree.odd_ones(found) == []


def test_after_another_token_nothing_is_compared():
    one = record("c")
    request = one.observation.requests[0]
    request.token_ids[0] = 50  # a near tie: its logprob is the same
    request.top_logprobs[1][0] -= 3
    assert agree.odd_ones([record("a"), record("b"), one]) == []


def test_another_token_is_compared_by_what_it_leaves_to_the_usual_one():
    one = record("c")
    request = one.observation.requests[0]
    request.token_ids[1] = 50
    request.top_logprobs[1][:2] = [-3.0, -0.1]
    (odd,) = agree.odd_ones([record("a"), record("b"), one])
    assert (odd.cell, odd.position) == ("c", 1)
    assert odd.distance_nats == pytest.approx(3 - 0.356675, abs=1e-5)


def test_a_run_with_an_odd_cell_fails_though_each_cell_passes(tmp_path, capsys):
    store.save_header(evidence.header("a", "b", "c"), tmp_path)
    for cell, off in (("a", -0.06), ("b", -0.06), ("c", 0.08)):
        store.save(record(cell, off), tmp_path)
    parser = argparse.ArgumentParser()
    judge.add_arguments(parser)
    assert judge.run(parser.parse_args([str(tmp_path)])) == 1
    printed = capsys.readouterr().out
    assert printed.count("  pass  ") == 3
    assert "fail: odd one out: c: 0.0-p[1]" in printed
