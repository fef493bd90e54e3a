"""Questions about answers, and their verdicts as rows for training: one answer that is good or bad, or the better of two."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nemo_kto.data.rows.records import SOURCE, Row, TextOrMessages
from nemo_kto.errors import UserError, plural, show
from nemo_kto.tools.inference.row_output import RowFile, thumb_row
from nemo_kto.tools.rounds.answers import VARIABLES, Sampled

_SETTINGS = ("round", "threshold", "rubric")  # in the source of a row, beside the labeller
TIE, BOTH_BAD = "tie", "both_bad"  # verdicts on two answers neither of which is better
Verdict = bool | str  # whether the answer is good, or the first one the better; TIE, BOTH_BAD


@dataclass(frozen=True, kw_only=True)
class Question:
    """One answer, which may be good, or two answers to a prompt in the order shown, the first of which may be better."""

    answers: tuple[Sampled, ...]

    @property
    def prompt(self) -> TextOrMessages:
        """The common prompt."""
        return self.answers[0].prompt

    @property
    def key(self) -> str:
        """Line of the prompt and numbers of the answers in any order, which are unique in a file."""
        return _key(self.answers[0].key[0], [answer.key[1] for answer in self.answers])

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The possible verdicts."""
        return (True, False) if len(self.answers) == 1 else (True, False, TIE, BOTH_BAD)

    def row(self, verdict: Verdict, **about: object) -> dict[str, object]:
        """Return the row of a verdict; ``about``: labeller and round.

        Training leaves out the rows of TIE and BOTH_BAD, which have the form of arenas, as rows without a label.
        """
        first, variables = self.answers[0], {VARIABLES: self.answers[0].variables} if self.answers[0].variables else {}
        if len(self.answers) == 1:
            source = {**first.source, **({"cut": True} if first.is_cut else {}), **about}
            return {**thumb_row(self.prompt, first.answer, good=verdict is True, source=source), **variables}
        one, other = self.answers if verdict else reversed(self.answers)
        cut = {"cut": [one.is_cut, other.is_cut]} if one.is_cut or other.is_cut else {}
        source = {**first.source, "index": [one.key[1], other.key[1]], **cut, **about}
        names, winner = ("chosen", "rejected"), {}
        if isinstance(verdict, str):
            names, winner = ("response_a", "response_b"), {"winner": verdict}
        return {"prompt": self.prompt, names[0]: one.answer, names[1]: other.answer, **winner, SOURCE: source, **variables}


def single_questions(answers: Iterable[Sampled]) -> list[Question]:
    """Return a question for each answer."""
    return [Question(answers=(answer,)) for answer in answers]


def pair_questions(answers: Sequence[Sampled]) -> list[Question]:
    """Return questions for the first and second answer to each prompt, the third and fourth, and so on.

    Equal answers are left out. Which answer is shown first is drawn with the key as the seed.
    """
    questions = []
    for group in _by_prompt(answers):
        for pair in zip(group[::2], group[1::2], strict=False):
            draw = random.Random(f"{pair[0].key} {pair[1].key}")  # nosec B311
            shown = pair if draw.random() < 0.5 else pair[::-1]
            if pair[0].answer != pair[1].answer:
                questions.append(Question(answers=shown))
    return questions


def best_and_worst(answers: Sequence[Sampled], scores: Mapping[tuple[int, int], float]) -> list[Question]:
    """Return, for each prompt whose answers differ in their scores, its best answer before its worst one."""
    groups = [sorted(group, key=lambda answer: scores[answer.key]) for group in _by_prompt(answers)]
    return [Question(answers=(each[-1], each[0])) for each in groups if scores[each[0].key] < scores[each[-1].key]]


def _by_prompt(answers: Sequence[Sampled]) -> Iterator[list[Sampled]]:
    return (list(group) for _, group in groupby(answers, key=lambda answer: answer.key[0]))


class Labelling:
    """Verdicts on questions, one after the other, each in the file before the next question is shown.

    Attributes:
        position: number of questions that are behind; the questions with a verdict in the file come first.
    """

    def __init__(self, *, questions: Sequence[Question], file: RowFile, about: Mapping[str, object]) -> None:
        """Find the questions that have a verdict in the file; UserError if the file has rows of others.

        ``about`` are the labeller, the round and the settings of the labels, of which one labeller has the same in all rows.
        """
        self._file, self._about = file, about
        known = {question.key: question for question in questions}
        labelled = [known.pop(key_of_row(row), None) for row in file.rows]
        for number, (row, question) in enumerate(zip(file.rows, labelled, strict=True), start=1):
            possible = () if question is None else map(question.row, question.verdicts)
            if not any({**row, SOURCE: None} == {**each, SOURCE: None} for each in possible):
                text = f"--out must have labels of these answers, each once, got {show(row, 200)} in {file.path}:{number}"
                raise UserError(f"{text}; name another --out, or the answers that these labels are of")
            source: Any = row[SOURCE]
            differing = [name for name in _SETTINGS if source.get(name) != about.get(name)]
            if differing and source.get("labeller") == about.get("labeller"):
                got = " and ".join(f"{name} {source.get(name)} instead of {about.get(name)}" for name in differing)
                text = f"--out must have labels of this command, got {got} in {file.path}:{number}"
                raise UserError(f"{text}; repeat the command of that file, or name another --out")
        self._questions = [*filter(None, labelled), *known.values()]
        self._has_row = [True] * len(labelled)
        self.total = len(self._questions)

    @property
    def position(self) -> int:
        return len(self._has_row)

    @property
    def left(self) -> list[Question]:
        """The questions without a verdict."""
        return self._questions[self.position :]

    @property
    def tally(self) -> str:
        """The numbers of verdicts in the file, such as "4 good, 3 bad" or "2 preferences, 1 tie, 1 both bad"."""
        counts = Counter(row.get("winner", row.get("label")) for row in self._file.rows)
        singles = [f"{counts[verdict]:,} {name}" for verdict, name in ((True, "good"), (False, "bad"))]
        pairs = [plural(counts[verdict], noun) for verdict, noun in ((None, "preference"), (TIE, "tie")) if counts[verdict]]
        pairs += [f"{counts[BOTH_BAD]:,} both bad"] if counts[BOTH_BAD] else []
        return ", ".join(singles if counts.keys() & {True, False} else pairs)

    def record(self, question: Question, verdict: Verdict) -> None:
        """Write the verdict on a question that is left."""
        self._file.append(question.row(verdict, **self._about))

    def answer(self, verdict: Verdict | None) -> None:
        """Write the verdict on the next question; None skips it until the next start."""
        if verdict is not None:
            self.record(self.left[0], verdict)
        self._has_row.append(verdict is not None)

    def undo(self) -> None:
        """Go back to the question before, and remove its verdict."""
        if self._has_row and self._has_row[-1]:
            self._file.remove_last()
        del self._has_row[-1:]


def _key(line: object, indices: Iterable[object]) -> str:
    return f"{line}:{'-'.join(sorted(map(str, indices)))}"


def key_of_row(row: Row) -> str:
    """Return the key of the question that a row of a file answers; empty if it has none."""
    source: Any = row.get(SOURCE)
    if not isinstance(source, dict):
        return ""
    index = source.get("index")
    return _key(source.get("line"), index if isinstance(index, list) else [index])
