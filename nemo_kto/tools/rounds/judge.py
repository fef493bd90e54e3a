"""Labels by a function of the user, or by a model that judges with a rubric."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from nemo_kto.data.rows.records import TextOrMessages
from nemo_kto.errors import UserError, describe, import_object, plural, printable, show
from nemo_kto.tools.rounds.answers import Sampled, messages_of, text_of
from nemo_kto.tools.rounds.endpoint import Endpoint, RefusedError
from nemo_kto.tools.rounds.labelling import Question
from nemo_kto.tools.rounds.replies import Reply
from nemo_kto.tools.rounds.verdicts import read_verdict

Scores = Mapping[tuple[int, int], bool | float]
_MAX_FAULTS = 10
_JUDGE_TOKENS = 2048  # with the thoughts of a model that reasons
_WORDS = {1: ("good", "bad"), 2: ("A", "B")}  # the verdict that is true first
_ASK = {
    1: "Is the answer good or bad by the rubric? Reply with one word: good or bad.",
    2: "Which answer is better by the rubric? Reply with one letter: A or B.",
}


class Scorer:
    """A function of prompt and answer, which returns a number or whether the answer is good."""

    def __init__(self, *, path: str) -> None:
        """Import the function package.module.NAME; UserError if it cannot be."""
        self._path = path
        try:
            self._function = cast(Callable[[TextOrMessages, str], object], import_object(path))
        except UserError as error:
            raise UserError(f"--score {error}") from error
        if not callable(self._function):
            raise UserError(f"--score must be the path of a function, got {path}, which is {show(self._function)}")

    def score(self, answer: Sampled) -> bool | float:
        """Return the score of an answer; UserError if the function has none."""
        try:
            value: Any = self._function(answer.prompt, answer.text)
            value = value.item() if hasattr(value, "item") else value  # of numpy or torch
            if (
                isinstance(value, bool | int | float) and abs(value) <= sys.float_info.max
            ):  # neither inf nor nan, nor 10**400
                return value
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may raise anything, and end the process by SystemExit
            raise UserError(f"{answer.place}: {self._path} raised {printable(describe(error))}") from error
        raise UserError(f"{answer.place}: {self._path} must return a finite number or a bool, got {show(value)}")

    def scores(self, answers: Sequence[Sampled]) -> Scores:
        """Return the score of each answer by its key; UserError with all answers for which the function has none."""
        scores, faults = dict[tuple[int, int], bool | float](), list[str]()
        for answer in answers:
            try:
                scores[answer.key] = self.score(answer)
            except UserError as error:
                faults.append(str(error))
        _refuse(faults)
        return scores

    def votes(self, pairs: Sequence[Question]) -> Iterator[tuple[Question, tuple[float, float]]]:
        """Yield each pair of answers with their scores; at the end UserError with all answers that have none."""
        faults = list[str]()
        for pair in pairs:
            scores = list[float]()
            for answer in pair.answers:
                try:
                    scores.append(self.score(answer))
                except UserError as error:
                    faults.append(str(error))
            if len(scores) == 2:
                yield pair, (scores[0], scores[1])
        _refuse(faults)


def _refuse(faults: Sequence[str]) -> None:
    """Raise UserError if there are answers without a score."""
    if faults:
        title = f"{plural(len(faults), 'answer')} without a score; correct the function:"
        raise UserError("\n  ".join([title, *faults[:_MAX_FAULTS]]))


class Judge:
    """A model that gives one verdict on a question, by the rules of a rubric."""

    def __init__(self, *, endpoint: Endpoint, rubric: str) -> None:
        self._endpoint, self._rubric = endpoint, rubric
        self.model = endpoint.model

    def verdicts(self, questions: Sequence[Question]) -> Iterator[tuple[Question, bool | str]]:
        """Yield each question with its verdict, or, if the reply is none, a text with the reason."""
        for question, reply in self._endpoint.map(self._ask, questions):
            if isinstance(reply, RefusedError):
                yield question, str(reply)
                continue
            verdict = read_verdict(reply.text, _WORDS[len(question.answers)])
            yield question, f"no clear verdict in {printable(reply.text, 120)!r}" if verdict is None else verdict

    def votes(self, pairs: Sequence[Question]) -> Iterator[tuple[Question, tuple[float, float] | str]]:
        """Yield each pair of answers with the number of orders in which each of them is better, or why there is no verdict.

        The model is asked about a pair in both orders, so that a preference for the first answer shown favours neither.
        """
        orders = [order for pair in pairs for order in (pair, Question(answers=pair.answers[::-1]))]
        known, found = {pair.key: pair for pair in pairs}, dict[str, list[bool | str]]()
        for order, verdict in self.verdicts(orders):
            pair = known[order.key]
            verdicts = found.setdefault(pair.key, [])
            verdicts.append(verdict if isinstance(verdict, str) else verdict == (order is pair))
            if len(verdicts) == 2:
                fault = next((each for each in verdicts if isinstance(each, str)), None)
                yield pair, fault or (verdicts.count(True), verdicts.count(False))

    def _ask(self, question: Question) -> Reply:
        names = ("",) if len(question.answers) == 1 else (" A", " B")
        turns = [f"<{each['role']}>\n{text_of([each])}\n</{each['role']}>" for each in messages_of(question.prompt)]
        shown = [
            f"Answer{name}:\n<answer>\n{each.text}\n</answer>" for name, each in zip(names, question.answers, strict=True)
        ]
        content = "\n\n".join(["Conversation:", *turns, *shown, _ASK[len(question.answers)]])
        messages = [{"role": "system", "content": self._rubric}, {"role": "user", "content": content}]
        return self._endpoint.complete(messages, temperature=0, max_tokens=_JUDGE_TOKENS)
