"""Intervals of an AUC."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_kto.utils.intervals import MIN_VALIDATION_ROWS, auc_interval


def test_the_standard_error_is_that_of_the_paper() -> None:
    """Hanley and McNeil (1982), table 2: an AUC of 0.893 of 51 and 58 cases has a standard error of 0.032."""
    low, high = auc_interval(0.893, 51, 58)
    assert (high - low) / 2 / 1.96 == pytest.approx(0.0325, rel=0.05)


@pytest.mark.parametrize("auc", [0.5, 0.8])
def test_nineteen_of_twenty_intervals_contain_the_auc(auc: float) -> None:
    draw, shift = np.random.default_rng(0), {0.5: 0.0, 0.8: 1.19023}[auc]  # of two normal distributions
    hits = 0
    for _ in range(400):
        better, worse = draw.normal(shift, 1, 20), draw.normal(0, 1, 15)
        low, high = auc_interval(float((better[:, None] > worse).mean()), 20, 15)
        hits += low <= auc <= high
    assert 0.92 < hits / 400 < 0.99


def test_an_auc_of_few_examples_shows_nothing() -> None:
    low, high = auc_interval(1.0, 1, 1)
    assert (low, high) == (pytest.approx(1 / (1 + 1.96**2)), 1.0)
    half = MIN_VALIDATION_ROWS // 2
    assert auc_interval(0.72, half, half)[0] < 0.5, "not even 0.72 differs from chance"
