# SPDX-License-Identifier: Apache-2.0
"""Budgets: the resolution is the format's, and the bounds on metrics hold for rounded logits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from harness.judging import metrics, tolerance


@pytest.mark.parametrize(
    ("magnitude", "bits", "step"),
    [(1.0, 7, 2**-7), (1.99, 7, 2**-7), (-6.0, 7, 2**-5), (1.0, 23, 2**-23), (300.0, 7, 2.0)],
)
def test_resolution_is_the_distance_to_the_next_number(magnitude, bits, step):
    assert tolerance.resolution(magnitude, bits) == step


def test_resolution_agrees_with_numpy_for_float32():
    values = np.float32([0.1, 1, 3.7, 250])
    assert tolerance.resolution(values, 23) == pytest.approx(np.spacing(values))


def test_budget_is_twice_the_floor_and_one_step_and_for_a_divergence_four_times():
    assert tolerance.budget("decode_logprob_error", 0.25, 0.03125) == 0.53125
    assert tolerance.budget("top20_kl", 0.25, 0.03125) == 1.03125


@given(st_numpy.arrays(np.float64, (1, 16), elements=st.floats(-8, 8)), st.randoms())
def test_rounding_logits_moves_no_metric_past_its_resolution(logits, random):
    step = tolerance.resolution(np.abs(logits).max(-1), 7)
    rounded = logits + np.array([[random.uniform(-0.5, 0.5) for _ in range(16)]]) * step
    exact, moved = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits, rounded))
    for name, errors in (
        ("decode_logprob_error", metrics.logprob_error(exact, moved).max(-1)),
        ("top20_kl", metrics.top_k_kl(exact, moved)),
        ("total_variation", metrics.total_variation(exact, moved)),
    ):
        assert errors <= tolerance.metric_resolution(name, step) + 1e-9, name


def test_an_unknown_precision_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown precision 'int4'; known: fp32, bf16, fp8"):
        tolerance.precision("int4")
