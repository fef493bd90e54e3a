"""Rows in our form: missing values, messages that are written as text, and the formats of other projects."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, NamedTuple, cast

from nemo_kto.data.rows.labels import label_text
from nemo_kto.data.rows.records import (
    ANSWERS,
    LABEL_COLUMNS,
    PAIR_KEYS,
    REWARDS,
    TEMPLATE_KEYS,
    WEIGHT,
    DataError,
    Row,
    RowError,
)
from nemo_kto.errors import printable, show

TEXT_COLUMNS = ("prompt", *ANSWERS, *chain(*PAIR_KEYS))  # may be a text, or messages
_NEVER_TEXT = frozenset({"messages", *TEMPLATE_KEYS})
_EMPTY_IS_A_VALUE = frozenset({*TEXT_COLUMNS, *LABEL_COLUMNS})
_OBJECT = re.compile(r"\s*\[?\s*\{")
_MESSAGE_KEYS = (re.compile(r"""["']role["']\s*:\s*["']\w"""), re.compile(r"""["']content["']\s*:"""))
_KEY = "model.data.json_columns"


def check_json_columns(columns: Collection[str] | None) -> None:
    """Raise a DataError unless the columns (``model.data.json_columns``) are such that may contain messages."""
    if wrong := sorted(set(columns or ()) - set(TEXT_COLUMNS)):
        text = f"must list names out of {', '.join(TEXT_COLUMNS)}, got {printable(wrong[0], 60)}"
        raise DataError(f"{text}; for a column of another name, write the name that model.data.fields maps to it")


def without_nulls(value: Any) -> Any:
    """Return a value without null values in its objects: a table has all fields of any row in every row."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read_values(row: Row, json_columns: Collection[str] | None, *, has_cells: bool) -> Row:
    """Return a row without missing values, in which JSON, and the numbers of a csv file, are read from their text.

    Null is missing, and so is an empty text, except in the columns of texts. A row whose only labels are missing has an
    empty label. RowError if a value that must be JSON is not, or if, without ``json_columns``, a text is one of messages.
    """
    empty = {name for name, value in row.items() if value is None or (isinstance(value, str) and not value.strip())}
    empty |= {name for name in LABEL_COLUMNS if name in row and row[name] != row[name]}  # not a number
    missing = {name for name in empty if row[name] is None or name not in _EMPTY_IS_A_VALUE}
    missing |= {*chain(*(keys for keys in PAIR_KEYS if empty.issuperset(keys))), *empty.intersection(LABEL_COLUMNS)}
    values = {name: value for name, value in row.items() if name not in missing}
    if not values.keys() & set(LABEL_COLUMNS):
        values |= dict.fromkeys(empty.intersection(LABEL_COLUMNS[:1]) or empty.intersection(LABEL_COLUMNS), "")
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    if json_columns is None and (wrong := [name for name in TEXT_COLUMNS if _is_of_messages(texts.get(name, ""))]):
        remedy = f"read it with '{_KEY}=[{','.join(wrong)}]', or keep it as text with '{_KEY}=[]'"
        raise RowError(f'"{wrong[0]}" must be a text or a list of messages, got a list of messages as text; {remedy}')
    for name in texts.keys() & _NEVER_TEXT.union(json_columns or ()):
        values[name] = _parsed(name, texts[name])
    for name in texts.keys() & {WEIGHT, *REWARDS} if has_cells else ():
        with contextlib.suppress(ValueError):  # reported as no number
            values[name] = float(texts[name])
    return values


def _is_of_messages(text: str) -> bool:
    return _OBJECT.match(text) is not None and all(key.search(text) for key in _MESSAGE_KEYS)


def _parsed(name: str, text: str) -> object:
    """Return the value of a text in JSON, or in the notation in which Python and pandas write lists into a csv file."""
    value: object = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
    if value is None and _OBJECT.match(text):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes
            value = ast.literal_eval(text.strip())
    try:
        if value is None:
            raise ValueError("it is not JSON")
        json.dumps(value, ensure_ascii=False).encode()  # an escape may have been a lone surrogate
    except (ValueError, TypeError, RecursionError) as error:
        reason = "a lone surrogate" if isinstance(error, UnicodeEncodeError) else f"a string that is not: {show(text)}"
        raise RowError(f'"{name}" must be a list or an object in JSON, got {reason}; write it with json.dumps') from error
    return without_nulls(value)


_FIRST, _SECOND = ("a", "response_a", "model_a"), ("b", "response_b", "model_b")
_TIES = ("tie", "tie_(bothbad)", "both_bad", "bothbad", "both", "neither")


class _Format(NamedTuple):
    required: frozenset[str]  # columns by which the format is recognised
    optional: frozenset[str]  # further columns that it reads
    convert: Callable[[Row], Row]


def in_our_form(row: Row) -> tuple[Row, frozenset[str]]:
    """Return a row in our form, and the columns that were converted; the row itself and none if it is no other format.

    RowError if a value of the other format is invalid.
    """
    if any(keys[0] in row for keys in PAIR_KEYS):
        return row, frozenset()
    for required, optional, convert in _FORMATS:
        if required.issubset(row):
            read = required | optional.intersection(row)
            return {**{name: value for name, value in row.items() if name not in read}, **convert(row)}, read
    return row, frozenset()


def is_tie(row: Row) -> bool:
    """Return whether a row that :func:`in_our_form` has converted prefers no answer."""
    return "chosen" not in row  # a blank label alone may be that of a file which also has unpaired rows


def _openai(row: Row) -> Row:
    """{"input": {"messages", "tools"}, "preferred_output", "non_preferred_output"}."""
    given = row["input"]
    if not isinstance(given, dict) or "messages" not in given:
        raise RowError(f'"input" must be an object with "messages", got {show(given)}')
    tools = {"tools": given["tools"]} if given.get("tools") else {}
    return {"prompt": given["messages"], "chosen": row["preferred_output"], "rejected": row["non_preferred_output"], **tools}


def _completions(prompt: str, *, answer: str, score: str, sign: int = 1) -> Callable[[Row], Row]:
    """{PROMPT, "completions": [{ANSWER, SCORE}, ...]}; with the sign -1 the smaller score is better."""

    def convert(row: Row) -> Row:
        answers = _scored(row["completions"], "completions", answer=answer, score=score, sign=sign)
        return {"prompt": row[prompt], **_preference(answers)}

    return convert


def _scored_lists(row: Row) -> Row:
    """{"prompt", "responses": [...], "scores": [...]}."""
    responses, scores = row["responses"], row["scores"]
    if not isinstance(responses, list) or not isinstance(scores, list) or len(responses) != len(scores):
        raise RowError(f'"responses" and "scores" must be lists of the same length, got {show(responses)}, {show(scores)}')
    pairs = [{"response": response, "score": score} for response, score in zip(responses, scores, strict=True)]
    return {"prompt": row["prompt"], **_preference(_scored(pairs, "responses", answer="response", score="score"))}


def _scored(value: object, key: str, *, answer: str, score: str, sign: int = 1) -> list[tuple[float, object]]:
    """Return (score, answer) of two answers, RowError for other numbers of them."""
    answers = value if isinstance(value, list) else []
    if len(answers) != 2:
        remedy = 'write the two that are compared as "chosen" and "rejected"'
        raise RowError(f'"{key}" must have two answers, got {len(answers) or show(value)}; {remedy}')
    found = []
    for each in answers:
        number = each.get(score) if isinstance(each, dict) else None
        if isinstance(number, bool) or not isinstance(number, int | float) or answer not in each:
            raise RowError(f'an answer in "{key}" must have "{answer}" and the number "{score}", got {show(each)}')
        found.append((sign * float(number), each[answer]))
    return found


def _preference(answers: list[tuple[float, object]]) -> Row:
    """Return the pair, or a row without a label if the scores are equal."""
    (worse, rejected), (better, chosen) = sorted(answers, key=lambda each: each[0])
    return {"response": chosen, "label": ""} if better == worse else {"chosen": chosen, "rejected": rejected}


def _swift_messages(row: Row) -> Row:
    """{"messages": [..., answer], "rejected_response": another answer} or "rejected_messages", a whole conversation."""
    rejected = row["rejected_messages" if "rejected_messages" in row else "rejected_response"]
    return {"prompt": _before_answer(row["messages"], "messages"), "chosen": row["messages"], "rejected": rejected}


def _before_answer(messages: object, key: str) -> list[Any]:
    if not isinstance(messages, list) or len(messages) < 2:
        raise RowError(f'"{key}" must have at least one message before the answer, got {show(messages)}')
    return messages[:-1]


def _swift_query(row: Row) -> Row:
    """{"query", "response", "rejected_response"}, with "system" and "history", a list of questions with their answers."""
    asked = row["query"] if "query" in row else row["prompt"]
    prompt: object = asked
    history = cast(list[Any], row.get("history") or [])
    if row.get("system") or history:
        if not isinstance(history, list) or not all(isinstance(each, list) and len(each) == 2 for each in history):
            raise RowError(f'"history" must be a list of [question, answer], got {show(history)}')
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        turns = [
            {"role": role, "content": text}
            for each in history
            for role, text in zip(("user", "assistant"), each, strict=True)
        ]
        prompt = [*system, *turns, {"role": "user", "content": asked}]
    return {"prompt": prompt, "chosen": row["response"], "rejected": row["rejected_response"]}


def _arena(first: str, second: str) -> Callable[[Row], Row]:
    """{FIRST, SECOND, "winner": "a", "b" or "tie"}."""

    def convert(row: Row) -> Row:
        winner = label_text(row["winner"])
        prompt = {} if "prompt" in row else {"prompt": _before_answer(row[first], first)}
        if winner in _TIES:
            return {**prompt, "response": row[first], "label": ""}
        if winner not in (*_FIRST, *_SECOND):
            wanted = ", ".join((*_FIRST, *_SECOND, *_TIES))
            raise RowError(f'"winner" must be one of {wanted}, got {show(row["winner"])}; correct it')
        names = (first, second) if winner in _FIRST else (second, first)
        return {**prompt, "chosen": row[names[0]], "rejected": row[names[1]]}

    return convert


def _format(required: str, convert: Callable[[Row], Row], optional: str = "") -> _Format:
    return _Format(frozenset(required.split()), frozenset(optional.split()), convert)


_FORMATS = (
    _format("input preferred_output non_preferred_output", _openai),
    # NeMo-RL, UltraFeedback
    _format("context completions", _completions("context", answer="completion", score="rank", sign=-1)),
    _format("instruction completions", _completions("instruction", answer="response", score="overall_score")),
    _format("prompt responses scores", _scored_lists),
    _format("messages rejected_response", _swift_messages),
    _format("messages rejected_messages", _swift_messages),
    _format("query response rejected_response", _swift_query, "system history"),
    _format("prompt response rejected_response", _swift_query, "system history"),
    _format("response_a response_b winner", _arena("response_a", "response_b")),
    _format("conversation_a conversation_b winner", _arena("conversation_a", "conversation_b"), "model_a model_b"),
)
