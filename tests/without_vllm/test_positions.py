# SPDX-License-Identifier: Apache-2.0
"""Budgets of positions: a right candidate passes as often as the references do, a wrong row does not."""

import numpy as np
import pytest

from harness.judging import metrics
from harness.judging.positions import Positions

STEP = 2.0**-6


def drawn(seed, positions=400, references=7, tips=0.02):
    """Errors of references and of one candidate that is like them: noise, and at some positions tips.

    A position that may tip does so in a third of all; the error there is thirty times the noise.
    """
    draw = np.random.default_rng(seed)
    shape = (references + 1, positions)
    errors = np.abs(draw.normal(0, 0.03, shape))
    may_tip = draw.random(positions) < tips
    errors += np.where(may_tip & (draw.random(shape) < 1 / 3), np.abs(draw.normal(0, 1, shape)), 0)
    return errors[1:], errors[0]


def cell(roundings, errors):
    return Positions(
        errors=dict.fromkeys(metrics.JUDGED, errors),
        roundings=dict.fromkeys(metrics.FLOORED, roundings),
        steps=np.full(len(errors), STEP),
    )


def test_the_budget_is_wide_where_references_disagree_and_nowhere_else():
    roundings = np.full((7, 5), 0.01)
    roundings[3, 2] = 1.0
    budgets = cell(roundings, np.zeros(5)).budgets("decode_logprob_error")
    mean = roundings.mean()
    assert budgets == pytest.approx([2 * mean + STEP] * 2 + [2 + STEP] + [2 * mean + STEP] * 2)


def test_candidates_that_are_like_the_references_stay_within_both_shares():
    for seed in range(200):
        found = cell(*drawn(seed))
        for share in (found.past_floor(), found.past_budget()):
            assert share.observed <= share.budget, seed


def test_one_row_in_twenty_that_is_wrong_is_past_the_share():
    for seed in range(50):
        roundings, errors = drawn(seed, tips=0.005)
        errors[::20] += 1.5
        share = cell(roundings, errors).past_budget()
        assert share.observed > share.budget, seed


def test_noise_of_twice_the_size_is_past_the_floor_too_often_and_hardly_past_a_budget():
    for seed in range(50):
        roundings, errors = drawn(seed, tips=0)
        found = cell(roundings, 2.5 * errors)
        assert found.past_floor().observed > found.past_floor().budget, seed


def test_what_is_no_number_is_past_its_budget():
    roundings, errors = drawn(1)
    errors[5] = np.nan
    before = cell(*drawn(1)).past_budget().count
    assert cell(roundings, errors).past_budget().count == before + 1


def test_each_reference_is_held_against_the_others():
    roundings = np.full((3, 4), 0.01)
    roundings[1, 2] = 1.0  # a tip that no other reference had
    assert cell(roundings, np.zeros(4)).past_budget().others == [0, 1, 0]
