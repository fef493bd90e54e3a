"""Win rate of a model against another one: pairs of their answers, a file of decisions, and figures with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from nemo_kto.errors import UserError, plural, show
from nemo_kto.tools.inference.row_output import RowFile
from nemo_kto.tools.rounds.answers import VARIABLES, Sampled, messages_of
from nemo_kto.tools.rounds.labelling import Question, key_of_row

_MAX_FAULTS = 10
_OUTCOMES = {"win": 1.0, "tie": 0.5, "loss": 0.0}
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


def pair_answers(model: Sequence[Sampled], base: Sequence[Sampled]) -> list[Question]:
    """Return the answers of two models with the same line and index as questions, with the answer of the model first.

    Raises UserError for answers of several models on one side, or for all without a counterpart, or to another prompt.
    """
    if mixed := [*_several_models("MODEL", model), *_several_models("BASE", base)]:
        raise UserError("\n  ".join(mixed))
    others, pairs, faults = {answer.key: answer for answer in base}, [], []
    for answer in model:
        other = others.pop(answer.key, None)
        if other is None:
            faults.append(f"{answer.place}: BASE has no answer with {_key_text(answer)}")
        elif messages_of(answer.prompt) != messages_of(other.prompt):
            faults.append(f"{answer.place}: another prompt than in {other.place}")
        elif answer.variables != other.variables:
            faults.append(f"{answer.place}: other {VARIABLES} than in {other.place}")
        else:
            pairs.append(Question(answers=(answer, other)))
    faults += [f"{other.place}: MODEL has no answer with {_key_text(other)}" for other in others.values()]
    if faults:
        got = f"{plural(len(faults), 'answer')} without a counterpart"
        title = f"MODEL and BASE must have answers to the same prompts, got {got}"
        remedy = "sample both with the same options (PROMPTS, -n, --system):"
        raise UserError("\n  ".join([f"{title}; {remedy}", *faults[:_MAX_FAULTS]]))
    return pairs


def _several_models(name: str, answers: Sequence[Sampled]) -> Iterator[str]:
    """Yield an error if the answers are not all of one model."""
    first = answers[0]
    if (other := next((each for each in answers if each.source["model"] != first.source["model"]), None)) is not None:
        got = " and ".join(f"{each.source['model']} in {each.place}" for each in (first, other))
        yield f"{name} must have the answers of one model, got {got}; write a file for each model"


def _key_text(answer: Sampled) -> str:
    line, index = answer.key
    return f"line {line} and index {index}"


class Comparison:
    """Decisions on pairs of answers, each in the file before the next one.

    Attributes:
        left: the pairs without a decision.
    """

    def __init__(self, *, pairs: Sequence[Question], file: RowFile, about: Mapping[str, object]) -> None:
        """Find the pairs that have a decision in the file, and write a tie for those of equal answers.

        ``about`` says what decides. Raises UserError if the file has rows of another command.
        """
        self._file, self._about = file, about
        differ: dict[bool, list[Question]] = {True: [], False: []}
        for pair in undecided_pairs(pairs, file, about):
            differ[pair.answers[0].answer != pair.answers[1].answer].append(pair)
        self.left = differ[True]
        file.append(*(_row(pair, None, about) for pair in differ[False]))

    def record(self, pair: Question, scores: Sequence[float]) -> None:
        """Write the decision on a pair: the answer with the higher score is better, equal scores are a tie."""
        self._file.append(_row(pair, list(scores), self._about))

    def decisions(self) -> list[Decision]:
        """Return the decisions in the file."""
        return [
            Decision(prompt=row["source"]["line"], outcome=_OUTCOMES[row["verdict"]], lengths=tuple(row["lengths"]))
            for row in self._file.rows
        ]


def undecided_pairs(
    pairs: Sequence[Question], file: RowFile, about: Mapping[str, object], *, drawn: bool = True
) -> list[Question]:
    """Return the pairs without a decision in a file; UserError if the file has rows of another command.

    Only models, decider and keys are compared if the answers are not ``drawn`` yet.
    """
    known = {key_of_row(_row(pair, None, about)): pair for pair in pairs}
    for number, row in enumerate(file.rows, start=1):
        pair = known.pop(key_of_row(row), None)
        if (got := show(row, 200) if pair is None else _differences(pair, row, about, drawn=drawn)) != "":
            text = f"--out must have decisions of this command, each once, got {got} in {file.path}:{number}"
            raise UserError(f"{text}; repeat the command of that file, or name another --out")
    return [*known.values()]


def _row(pair: Question, scores: list[float] | None, about: Mapping[str, object]) -> dict[str, Any]:
    own, other = scores or (0, 0)
    first, second = pair.answers
    line, index = first.key
    models = {"model": first.source["model"], "base": second.source["model"]}
    return {
        "prompt": pair.prompt,
        "answers": [first.answer, second.answer],
        "verdict": "win" if own > other else "loss" if own < other else "tie",
        "scores": scores,
        "lengths": [len(first.text), len(second.text)],
        "source": {**models, "line": line, "index": index, **about},
    }


def _differences(pair: Question, row: Mapping[str, Any], about: Mapping[str, object], *, drawn: bool) -> str:
    """Return what differs between a row of a file and the row of this command; empty if nothing does."""
    scores = row.get("scores")
    is_valid = isinstance(scores, list) and len(scores) == 2 and all(isinstance(each, int | float) for each in scores)
    expected = _row(pair, scores if is_valid else None, about)
    if not drawn:
        expected, row = ({"source": each["source"]} for each in (expected, row))
    expected, found = ({**each, **each["source"], "source": None} for each in (expected, row))
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return " and ".join(f"{name} {show(found.get(name))} instead of {show(expected.get(name))}" for name in names)


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
