"""Numbers of reports as text."""

from __future__ import annotations

import pytest

from nemo_kto.report.text import MINUS, number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (0.25, "0.25"),
        (0.001, "0.001"),
        (0.00025, "2.5e-4"),
        (-1e-6, f"{MINUS}1e-6"),
        (1.05e-10, "1.05e-10"),
        (1899.3, "1899"),
        (9999.6, "10000"),
        (12_345, "12.35k"),
        (-12_345, f"{MINUS}12.35k"),
        (2.5e6, "2.5M"),
        (5e15, "5000000G"),
    ],
)
def test_a_number(value: float, text: str) -> None:
    assert number_text(value) == text


def test_a_number_between_1000_and_10000_has_no_exponent_with_fewer_digits() -> None:
    assert [number_text(value, digits=3) for value in (1899.3, 12_345, 0.000123456)] == ["1899", "12.3k", "1.23e-4"]
