# SPDX-License-Identifier: Apache-2.0
"""Metrics: right on distributions whose divergence is known, and lower bounds as they claim."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from harness.judging import metrics

LOGITS = st_numpy.arrays(np.float64, (2, 8), elements=st.floats(-5, 5))


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_kl_of_two_coins_is_the_textbook_figure():
    reference, candidate = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert metrics.top_k_kl(reference, candidate)[0] == pytest.approx(expected, rel=1e-6)


def test_total_variation_of_two_coins_is_half_their_distance():
    reference, candidate = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert metrics.total_variation(reference, candidate)[0] == pytest.approx(0.25)


def test_mass_outside_the_top_tokens_counts():
    reference, candidate = np.log([[0.5, 0.1]]), np.log([[0.5, 0.4]])
    assert metrics.total_variation(reference, candidate)[0] == pytest.approx(0.3)


@given(LOGITS)
def test_top_k_figures_never_exceed_those_of_the_whole_vocabulary(logits):
    p, q = np.exp(log_softmax(logits))
    top = np.argsort(-q)[:4]
    kl = metrics.top_k_kl(np.log(p[top])[None], np.log(q[top])[None])[0]
    variation = metrics.total_variation(np.log(p[top])[None], np.log(q[top])[None])[0]
    assert -1e-9 <= kl <= np.sum(p * np.log(p / q)) + 1e-6
    assert 0 <= variation <= 0.5 * np.abs(p - q).sum() + 1e-9


@given(LOGITS)
def test_equal_distributions_have_no_divergence(logits):
    logprobs = log_softmax(logits)[:, :5]
    assert metrics.top_k_kl(logprobs, logprobs) == pytest.approx(0, abs=1e-12)
    assert metrics.total_variation(logprobs, logprobs) == pytest.approx(0, abs=1e-12)


def test_logprob_error_is_absolute_and_per_position():
    assert metrics.logprob_error([-1.0, -2.0], [-1.5, -1.75]) == pytest.approx([0.5, 0.25])


def test_a_candidate_that_is_not_a_number_stays_one():
    assert np.isnan(metrics.logprob_error([-1.0], [math.nan])[0])
    assert np.isnan(metrics.top_k_kl([[-1.0]], [[math.nan]])[0])


def test_sqnr_of_an_error_a_hundredth_as_large_is_40_db():
    assert metrics.logprob_sqnr_db([-1.0, -1.0], [-1.01, -0.99]) == pytest.approx(40)
    assert metrics.logprob_sqnr_db([-1.0], [-1.0]) == math.inf


def test_different_positions_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\), candidate \(1,\)"):
        metrics.logprob_error([-1.0, -2.0], [-1.0])
