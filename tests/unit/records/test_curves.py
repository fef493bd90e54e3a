"""Curves: what is read from a log, smoothed, and kept for a drawing."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_kto.records.curves import Curve, read_curves
from nemo_kto.utils.text import MINUS, number_text


def curve(values: list[float] | np.ndarray) -> Curve:
    return Curve(steps=np.arange(1, len(values) + 1), values=np.asarray(values, dtype=np.float64))


def test_curves_of_a_log() -> None:
    lines: list[dict[str, float | None]] = [
        {"step": 1, "train/loss": 0.5},
        {"step": 1, "val/loss": 0.6},
        {"step": 2, "train/loss": None},
        {"step": 3, "train/loss": 0.4},
        {"step": 2, "train/loss": 0.45},  # repeated by a resumed run
        {"step": 3, "train/loss": 0.3},
    ]
    curves = read_curves(lines)
    assert set(curves) == {"train/loss", "val/loss"}
    assert curves["train/loss"].steps.tolist() == [1, 2, 3]
    assert curves["train/loss"].values.tolist() == [0.5, 0.45, 0.3]
    assert curves["val/loss"].last == 0.6


def test_smoothing_is_the_mean_of_a_centred_window() -> None:
    values = np.random.default_rng(0).normal(size=200)
    smooth = curve(values)
    assert smooth.window == 11
    expected = [values[max(0, place - 5) : place + 6] for place in range(200)]
    assert smooth.smoothed.values == pytest.approx([window.mean() for window in expected])
    assert smooth.spread == pytest.approx([window.std() for window in expected])


@pytest.mark.parametrize("place", [0, 99_999])
def test_peaks_survive_downsampling(place: int) -> None:
    values = np.random.default_rng(place).normal(size=100_000)
    values[place] = 50.0
    values[(place + 500) % 100_000] = -60.0
    drawn = curve(values).peaks(250)
    assert len(drawn) <= 500
    assert drawn.values.max() == 50.0
    assert drawn.values.min() == -60.0
    assert drawn.steps[drawn.values.argmax()] == place + 1
    assert (np.diff(drawn.steps) > 0).all()


def test_numbers_as_text() -> None:
    values = (-0.0, 0.25, 0.001, 0.00025, -1e-6, 1.05e-10, 1899.3, 9999.6, -12_345, 2.5e6)
    texts = ["0", "0.25", "0.001", "2.5e-4", f"{MINUS}1e-6", "1.05e-10", "1899", "10000", f"{MINUS}12.35k", "2.5M"]
    assert [number_text(value) for value in values] == texts
    assert [number_text(value, digits=3) for value in (1899.3, 12_345, 0.000123456)] == ["1899", "12.3k", "1.23e-4"]
