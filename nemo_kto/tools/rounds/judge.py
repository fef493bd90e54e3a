"""Labels by a function of the user, or by a model that judges with a rubric."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from nemo_kto.data.rows.records import TextOrMessages
from nemo_kto.errors import UserError, describe, import_object, plural, printable, show
from nemo_kto.tools.rounds.answers import Sampled, messages_of, text_of
from nemo_kto.tools.rounds.endpoint import Endpoint, RefusedError, Reply
from nemo_kto.tools.rounds.labelling import Question

Scores = Mapping[tuple[int, int], bool | float]
_MAX_FAULTS = 10
_JUDGE_TOKENS = 2048  # with the thoughts of a model that reasons
_WORDS = {1: ("good", "bad"), 2: ("A", "B")}  # the verdict that is true first
_ASK = {
    1: "Is the answer good or bad by the rubric? Reply with one word: good or bad.",
    2: "Which answer is better by the rubric? Reply with one letter: A or B.",
}
# thoughts with their end, whose beginning the template of some models writes, and without one
_THOUGHTS = re.compile(r"\A.*(?:</think(?:ing)?>|\[/THINK\]|<\|channel\|>final<\|message\|>|assistantfinal)", re.DOTALL)
_UNFINISHED = re.compile(r"(?:<think(?:ing)?>|\[THINK\]|<\|channel\|>analysis|\Aanalysis(?! )).*", re.DOTALL)
# what LaTeX, JSON and Markdown write around a word
_REPLACED = (
    ("\N{RIGHT SINGLE QUOTATION MARK}", "'"),
    (r"\\boxed\b", "verdict: "),
    (r"\\text\w*\b", ""),
    (r"\\n", "\n"),
    (r"[*_`\"\[\]{}$#\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}]|(?<!\w)'|'(?!\w)", ""),
    (r"\((\w+)\)", r"\1"),
    (r"[ \t]+", " "),
)
# In the patterns, X and Y are the two words, and all else is in lower case.
_SENTENCE = re.compile(r"(?<=[.!?]) |[\n;]+")
_DOUBT = re.compile(
    r"\b(?:not|never|neither|nor|none|nothing|cannot|hardly|barely|if|whether|unless|could|might|may|almost|nearly|between"
    r"|would (?:be|have)|no(?!,))\b|n't\b"
)
_NOUN = r"(?:(?:the )?(?:answer|response|option|assistant) )?"
_ADVERBS = r"(?:(?:really|very|clearly|definitely|overall|quite|actually|indeed|certainly|simply|much|slightly) )*"
_END = (
    r"(?= ?(?:$|[.;!()\u2013\u2014\u2192]|,(?! or\b)|-|\b(?:because|since|as|by|according|under|overall|but|than|over)\b"
    rf"|and\b(?! {_NOUN}[XY])))"
)
_I_SAY = r"i(?:'d| would)? (?:say|choose|pick|prefer)"
_START = rf"(?:^|[,:\u2013\u2014\u2192] ?|->? )(?:(?:so|thus|therefore|hence|then|yes|{_I_SAY}) )*"
_I_RATE = r"(?:rate|judge|label|consider|classify|call|deem)(?: (?:it|this|that|(?:the|this) (?:answer|response)))?"
_SAYS = rf"\b(?:is|was|it's|that's|be|choose|prefer|pick|select|say|{_I_RATE}(?: as| to be)?) "
_NAMED = re.compile(
    r"\b(?:verdict|judge?ment|decision|conclusion|final answer|winner|overall)(?: ?(?:is\b|[:=\u2013\u2014\u2192]|->?))+ ?"
    rf"{_NOUN}([XY])\b{_END}"
)
_STATED = re.compile(
    rf"(?:{_START}|{_SAYS}(?:an? )?){_ADVERBS}{_NOUN}([XY])\b(?: (?:answer|response|reply|one)\b)?{_END}"
    rf"|\b([XY]) (?:wins\b|(?:is|was) {_ADVERBS}(?:the )?(?:better|best|superior|stronger|preferable|preferred|winner)\b)"
)


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


def read_verdict(reply: str, words: tuple[str, str]) -> bool | None:
    """Return whether the verdict of a reply is the first of two words; None if it is ambiguous, or there is none.

    Words of one letter count in upper case. A verdict that is named as such (``verdict: good``, also in JSON) goes before
    what sentences state (``The answer is good.``); questions, negations and conditions state nothing.
    """
    text = _UNFINISHED.sub("", _THOUGHTS.sub("", reply, count=1))
    for pattern, instead in _REPLACED:
        text = re.sub(pattern, instead, text)
    if (said := text.strip(" \n.").lower()) in (known := [word.lower() for word in words]):
        return said == known[0]
    for word, mark in zip(words, "\0\1", strict=True):
        text = re.sub(rf"\b{word}\b", mark, text, flags=0 if len(word) == 1 else re.IGNORECASE)
    text = text.lower().replace("\0", "X").replace("\1", "Y").strip()
    found = set(_NAMED.findall(text))
    for sentence in [] if found else map(str.strip, _SENTENCE.split(text)):
        doubt = _DOUBT.search(sentence)
        for match in _STATED.finditer(sentence):
            if not sentence.endswith("?") and (doubt is None or doubt.end() > match.end()):
                found |= {*match.groups()} - {None}
    return found == {"X"} if len(found) == 1 else None
