"""Comparison of two models: pairs of their answers to the same prompts, and a file of decisions which is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_kto.errors import UserError, plural, show
from nemo_kto.tools.inference.row_output import RowFile
from nemo_kto.tools.rounds.answers import VARIABLES, Sampled, messages_of
from nemo_kto.tools.rounds.labelling import Question, key_of_row
from nemo_kto.tools.rounds.win_rate import Decision

_MAX_FAULTS = 10
_OUTCOMES = {"win": 1.0, "tie": 0.5, "loss": 0.0}


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
