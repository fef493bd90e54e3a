"""Win rates: cases by hand, published intervals, and the regression against torch's optimizer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from nemo_kto.tools.rounds.win_rate import _RIDGE, Decision, logistic_fit, win_rate


def decisions(outcomes: Sequence[float], differences: Sequence[int] | None = None, *, each: int = 1) -> list[Decision]:
    """Decisions with these outcomes and differences of the lengths, ``each`` of them about one prompt."""
    given = zip(outcomes, differences or [0] * len(outcomes), strict=True)
    return [
        Decision(prompt=number // each, outcome=outcome, lengths=(100 + more, 100))
        for number, (outcome, more) in enumerate(given)
    ]


def test_counts_rates_and_lengths() -> None:
    found = win_rate(decisions([1, 1, 1, 0.5, 0.5, 0], [10, 20, 30, 0, 0, 0]))
    assert (found.wins, found.ties, found.losses) == (3, 2, 1)
    assert found.rate == pytest.approx(4 / 6)
    assert found.mean_lengths == (110, 100)


def agresti_coull(wins: float, total: float) -> tuple[float, float]:
    rate = (wins + 2) / (total + 4)
    error = 1.96 * math.sqrt(rate * (1 - rate) / (total + 4))
    return max(0.0, rate - error), min(1.0, rate + error)


@pytest.mark.parametrize(
    ("outcomes", "each", "expected"),
    [
        ([1] * 13 + [0] * 7, 1, agresti_coull(13, 20)),  # one decision of each prompt without ties: the formula of 1998
        ([1] * 20, 1, agresti_coull(20, 20)),
        ([0] * 3, 1, agresti_coull(0, 3)),
        ([1, 1, 1, 1, 0, 0, 0, 0] * 5, 4, agresti_coull(5, 10)),  # equal outcomes of a prompt count as one
        (
            [1, 0] * 20,
            2,
            (0.5 - 1.96 * 1 / 24, 0.5 + 1.96 * 1 / 24),
        ),  # prompts do not differ, except for the four added ones
        ([0.5] * 20, 1, (0.5 - 1.96 * 1 / 24, 0.5 + 1.96 * 1 / 24)),
    ],
)
def test_the_interval(outcomes: list[float], each: int, expected: tuple[float, float]) -> None:
    found = win_rate(decisions(outcomes, each=each))
    assert found.interval == pytest.approx(expected)
    assert found.interval[0] <= found.rate <= found.interval[1]


def test_the_interval_contains_the_rate_of_most_samples() -> None:
    """Coverage of 400 samples of 30 prompts with three answers each, whose chances vary from prompt to prompt."""
    draw, covered = random.Random(0), 0
    for _ in range(400):
        chances = [draw.choice([0.3, 0.9]) for _ in range(30)]  # on average 0.6
        outcomes = [
            draw.choices([1, 0.5, 0], [0.8 * chance, 0.2, 0.8 - 0.8 * chance])[0] for chance in chances for _ in "abc"
        ]
        low, high = win_rate(decisions(outcomes, each=3)).interval
        covered += low <= 0.8 * 0.6 + 0.1 <= high
    assert 0.92 < covered / 400 < 0.98


@pytest.mark.parametrize(
    ("outcomes", "differences", "expected"),
    [
        ([1, 1, 1, 0], [0, 0, 0, 0], 0.75),  # equal lengths
        ([1, 1, 1, 0], [50, 50, 50, 50], 0.75),  # a constant difference explains nothing
        ([1, 0, 0, 0] * 2, [9] * 4 + [-9] * 4, 0.25),  # lengths that are independent of the outcomes
        ([1, 1], [3, 70], 1.0),
        ([1] * 10 + [0] * 10, [*range(1, 11), *range(-10, 0)], 0.5),  # the longer answer always wins
        ([0.5] * 4, [1, 2, 3, 4], 0.5),
    ],
)
def test_the_rate_at_equal_lengths(outcomes: list[float], differences: list[int], expected: float) -> None:
    assert win_rate(decisions(outcomes, differences)).length_controlled == pytest.approx(expected, abs=1e-9)


def test_lengths_that_explain_most_wins() -> None:
    """The answer is longer for three quarters of the prompts, and wins there."""
    found = win_rate(
        decisions([1] * 75 + [0] * 25, [20 + number for number in range(75)] + [-20 - number for number in range(25)])
    )
    assert found.rate == 0.75
    assert 0.45 < found.length_controlled < 0.55


@pytest.mark.parametrize("seed", range(4))
def test_the_regression_against_torch(seed: int) -> None:
    draw = random.Random(seed)
    terms = [math.tanh(draw.gauss(0.5, 1)) for _ in range(60)]
    outcomes = [draw.choice([0.5, float(draw.random() < 1 / (1 + math.exp(-0.4 - 3 * term)))]) for term in terms]
    if seed == 3:
        outcomes = [float(term > 0.3) for term in terms]  # the likelihood alone has no maximum
    values = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    targets, terms_N = torch.tensor(outcomes, dtype=torch.float64), torch.tensor(terms, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(
        [values], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.nn.functional.binary_cross_entropy_with_logits(
            values[0] + values[1] * terms_N, targets, reduction="sum"
        )
        total = total + 0.5 * _RIDGE * values[1] ** 2
        total.backward()
        return total

    optimizer.step(loss)
    assert logistic_fit(outcomes, terms) == pytest.approx(values.tolist(), rel=1e-5)
