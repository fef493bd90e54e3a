"""Win rate of a model against another one, its interval, and the win rate that answers of equal length would have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

_Z = 1.96  # standard errors on each side of a 95 % interval
_PSEUDO_PROMPTS = 2  # won, and as many lost
_RIDGE = 0.1  # precision of the normal prior of the slope
_TOLERANCE, _MAX_STEPS = 1e-10, 100


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which of two answers to a prompt is better.

    Attributes:
        prompt: the prompt, of which there may be several decisions.
        outcome: 1 if the answer of the model is better, 0 if that of the other model is, 0.5 for a tie.
        lengths: characters of the answer of the model, and of that of the other one.
    """

    prompt: int
    outcome: float
    lengths: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """Result of a comparison.

    Attributes:
        rate: share of wins, with half of the ties.
        interval: its 95 % interval.
        length_controlled: the rate that answers of equal length would have.
        mean_lengths: characters of the answers of the model, and of the other one.
    """

    wins: int
    ties: int
    losses: int
    rate: float
    interval: tuple[float, float]
    length_controlled: float
    mean_lengths: tuple[float, float]


def win_rate(decisions: Sequence[Decision]) -> WinRate:
    """Return the result of at least one decision."""
    outcomes = [decision.outcome for decision in decisions]
    own, other = zip(*(decision.lengths for decision in decisions), strict=True)
    return WinRate(
        wins=outcomes.count(1),
        ties=outcomes.count(0.5),
        losses=outcomes.count(0),
        rate=fmean(outcomes),
        interval=_interval(decisions),
        length_controlled=_length_controlled(decisions),
        mean_lengths=(fmean(own), fmean(other)),
    )


def _interval(decisions: Sequence[Decision]) -> tuple[float, float]:
    """Return the interval of Agresti and Coull (1998), with prompts as clusters.

    Two prompts that are won and two that are lost, of average size, are added to the N decisions on G prompts: with
    m = N / G, the centre is c = (sum of outcomes + 2 m) / (N + 4 m). The variance sums the residuals of a prompt before they
    are squared, because its decisions are not independent: sum over prompts of (sum of (outcome - c))^2 / (N + 4 m)^2. The
    added prompts give an interval of some width also if all outcomes are equal. Ties are outcomes like others.
    """
    by_prompt: dict[int, list[float]] = {}
    for decision in decisions:
        by_prompt.setdefault(decision.prompt, []).append(decision.outcome)
    size = len(decisions) / len(by_prompt)
    sums = [(float(len(each)), math.fsum(each)) for each in by_prompt.values()]
    sums += _PSEUDO_PROMPTS * [(size, size), (size, 0.0)]
    total = math.fsum(count for count, _ in sums)
    centre = math.fsum(outcome for _, outcome in sums) / total
    error = math.sqrt(math.fsum((outcome - count * centre) ** 2 for count, outcome in sums)) / total
    return max(0.0, centre - _Z * error), min(1.0, centre + _Z * error)


def _length_controlled(decisions: Sequence[Decision]) -> float:
    """Return the win rate at equal lengths, as in AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475).

    A logistic regression predicts the outcome:

        P(win) = sigmoid(theta + phi tanh(difference of the lengths / its standard deviation))

    and the result is its prediction without the term of the lengths, sigmoid(theta). AlpacaEval has a third term for the
    difficulty of the prompt, which needs the answers of many models. The penalty 0.05 phi^2 keeps phi finite if the lengths
    explain all outcomes.
    """
    rate = fmean(decision.outcome for decision in decisions)
    differences = [own - other for own, other in (decision.lengths for decision in decisions)]
    if rate in (0, 1) or (deviation := pstdev(differences)) == 0:
        return rate  # theta is infinite, or phi undetermined
    terms = [math.tanh(difference / deviation) for difference in differences]
    theta, _ = logistic_fit([decision.outcome for decision in decisions], terms)
    return _sigmoid(theta)


def logistic_fit(outcomes: Sequence[float], terms: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of a logistic regression with a ridge on the slope, by Newton's method.

    The outcomes must not be all 0 or all 1, or the intercept would be infinite.
    """
    pairs = list(zip(outcomes, terms, strict=True))

    def objective(intercept: float, slope: float) -> float:
        logits = ((outcome, intercept + slope * term) for outcome, term in pairs)
        likelihood = math.fsum(
            outcome * logit - max(logit, 0.0) - math.log1p(math.exp(-abs(logit))) for outcome, logit in logits
        )
        return likelihood - 0.5 * _RIDGE * slope**2

    intercept = slope = 0.0
    for _ in range(_MAX_STEPS):
        chances = [_sigmoid(intercept + slope * term) for term in terms]
        residuals = [outcome - chance for outcome, chance in zip(outcomes, chances, strict=True)]
        weights = [chance * (1 - chance) for chance in chances]
        gradient = math.fsum(residuals), math.fsum(map(math.prod, zip(residuals, terms, strict=True))) - _RIDGE * slope
        first = math.fsum(weights)
        mixed = math.fsum(weight * term for weight, term in zip(weights, terms, strict=True))
        second = math.fsum(weight * term**2 for weight, term in zip(weights, terms, strict=True)) + _RIDGE
        determinant = first * second - mixed**2
        step = (
            (second * gradient[0] - mixed * gradient[1]) / determinant,
            (first * gradient[1] - mixed * gradient[0]) / determinant,
        )
        before = objective(intercept, slope)
        while max(map(abs, step)) > _TOLERANCE and objective(intercept + step[0], slope + step[1]) < before:
            step = step[0] / 2, step[1] / 2  # far from the maximum a whole step may go beyond it
        intercept, slope = intercept + step[0], slope + step[1]
        if max(map(abs, step)) <= _TOLERANCE:
            break
    return intercept, slope


def _sigmoid(logit: float) -> float:
    return 0.5 * (1 + math.tanh(0.5 * logit))  # does not overflow
