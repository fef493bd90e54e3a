"""From a line of a jsonl file to a record: a prompt with one answer (unpaired feedback), or with a chosen and a rejected.

A row for KTO may be written in any of these forms (further keys are ignored), one for DPO in the last:

    {"prompt": "...", "response": "...", "preference": "chosen" | "rejected"}
    {"prompt": "...", "completion": "...", "label": true | false}
    {"messages": [..., {"role": "assistant", ...}], "label": true | false}
    {"prompt": "...", "chosen": "...", "rejected": "..."}      a pair; also chosen_response, rejected_response

Wherever a string stands, a list of messages may stand instead. A pair may leave out its prompt: it is what both sides share.
A pair may have "chosen_reward" and "rejected_reward".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from nemo_kto.errors import UserError

Row = Mapping[str, object]
Message = Mapping[str, object]
TextOrMessages = str | list[Message]
Record = TypeVar("Record")

_PAIR_KEYS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
_PREFERENCES = {"chosen": True, "rejected": False}
_DIALOGUE_ANSWER = "\n\nAssistant:"


class DataError(UserError):
    """The data cannot be used; the message says which rows or files, why, and what to do."""


class RowError(ValueError):
    """What is wrong with one row; whoever reads the file adds its name and the line."""


@dataclass(kw_only=True)
class RowErrors:
    """Counts broken rows and keeps the first ten messages, however many rows are broken."""

    SHOWN: ClassVar = 10
    total: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, path: str | Path, line: int, what: str) -> None:
        """Note that line ``line`` (counted from 1) of ``path`` cannot be used."""
        self.total += 1
        if len(self.shown) < self.SHOWN:
            self.shown.append(f"{path}:{line}: {what}")

    def raise_if_any(self) -> None:
        """Raise one DataError for all rows that were added."""
        if self.total:
            first = f", the first {self.SHOWN}" if self.total > self.SHOWN else ""
            head = f"{self.total} broken row{'s' if self.total > 1 else ''}{first}:"
            raise DataError("\n  ".join([head, *self.shown]))


@dataclass(frozen=True, kw_only=True)
class KTORecord:
    """One prompt with one answer and its label.

    Attributes:
        prompt: plain text, or the messages before the answer.
        response: plain text, or one assistant message in a list; of the same kind as ``prompt``.
        desirable: whether the answer is one to learn.
        line: where it came from, counted from 1; the two records of a pair share it.
    """

    prompt: TextOrMessages
    response: TextOrMessages
    desirable: bool
    line: int


@dataclass(frozen=True, slots=True)
class KTOExample:
    """One tokenised record.

    Attributes:
        prompt_ids: [P] int, P >= 1.
        response_ids: [R] int, R >= 1, end-of-turn included where the answer was not cut.
        desirable: whether the answer is one to learn.
    """

    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    desirable: bool


@dataclass(frozen=True, kw_only=True)
class DPORecord:
    """One prompt with two answers, of which one was chosen.

    Attributes:
        prompt: plain text, or the messages before the answer.
        chosen, rejected: plain text, or one assistant message in a list; of the same kind as ``prompt``.
        chosen_reward, rejected_reward: what the row says the answers are worth; both None if it says nothing.
        line: where it came from, counted from 1.
    """

    prompt: TextOrMessages
    chosen: TextOrMessages
    rejected: TextOrMessages
    chosen_reward: float | None
    rejected_reward: float | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOExample:
    """One tokenised pair.

    Attributes:
        prompt_ids: [P] int, P >= 1.
        chosen_ids, rejected_ids: [C] and [R] int, at least 1, end-of-turn included where the answer was not cut.
        chosen_reward, rejected_reward: what the answers are worth, in any unit.
    """

    prompt_ids: Sequence[int] | np.ndarray
    chosen_ids: Sequence[int] | np.ndarray
    rejected_ids: Sequence[int] | np.ndarray
    chosen_reward: float
    rejected_reward: float


def read_kto_records(path: str | Path, broken: RowErrors) -> Iterator[KTORecord]:
    """The labelled answers of one jsonl file, in file order, one line in memory at a time; empty lines are skipped.

    Args:
        path: the file.
        broken: collects the rows that are left out, for a caller that reads other files next.
    """
    return _read(path, records_of_row, broken)


def read_dpo_records(path: str | Path, broken: RowErrors) -> Iterator[DPORecord]:
    """The pairs of one jsonl file; everything else as in :func:`read_kto_records`."""
    return _read(path, lambda row, line: [pair_of_row(row, line)], broken)


def _read(path: str | Path, records_of: Callable[[Row, int], list[Record]], broken: RowErrors) -> Iterator[Record]:
    with open(path, "rb") as file:
        for line, raw in enumerate(file, start=1):
            if raw.isspace():
                continue
            try:
                records = records_of(_parse(raw), line)
            except RowError as error:
                broken.add(path, line, str(error))
                continue
            yield from records


def records_of_row(row: Row, line: int) -> list[KTORecord]:
    """One record, or two for a pair (the desirable one first).

    Raises:
        RowError: the row has none of the known forms, or a value that has no meaning there.
    """
    if keys := _pair_keys(row):
        chosen, rejected = _pair(row, *keys)
        return [_record(chosen, True, line), _record(rejected, False, line)]
    desirable = _label(row)
    if "messages" in row:
        return [_record(_conversation(row["messages"], "messages"), desirable, line)]
    answer_keys = [key for key in ("response", "completion") if key in row]
    if "prompt" not in row or len(answer_keys) != 1:
        raise RowError(
            'a row must have "prompt" and one of "response" or "completion", or "messages", or "chosen" and "rejected"; '
            f"got the keys {sorted(row)}"
        )
    key = answer_keys[0]
    return [_record(_prompt_and_answer(row["prompt"], row[key], key), desirable, line)]


def pair_of_row(row: Row, line: int) -> DPORecord:
    """The pair that a row is.

    Raises:
        RowError: the row is no pair, its sides have different prompts, or a value has no meaning there.
    """
    keys = _pair_keys(row)
    if keys is None:
        raise RowError(
            'a row must have "chosen" and "rejected" (or "chosen_response" and "rejected_response"), '
            f"got the keys {sorted(row)}; unpaired feedback is for KTO"
        )
    good, bad = keys
    chosen, rejected = _pair(row, good, bad)
    if chosen[0] != rejected[0]:
        raise RowError(f'"{good}" and "{bad}" must answer the same prompt; make the messages before the answers equal')
    rewards = {key: _reward(row, key) for key in ("chosen_reward", "rejected_reward")}
    missing = [key for key, reward in rewards.items() if reward is None]
    if len(missing) == 1:
        raise RowError(f'a pair must have both "chosen_reward" and "rejected_reward" or neither; "{missing[0]}" is missing')
    return DPORecord(prompt=chosen[0], chosen=chosen[1], rejected=rejected[1], line=line, **rewards)


def _reward(row: Row, key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    try:
        reward = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer of more than 308 digits
        reward = math.inf
    if not math.isfinite(reward):
        raise RowError(f'"{key}" must be a finite number, got {_show(value)}; correct it or leave both rewards out')
    return reward


def _record(side: tuple[TextOrMessages, TextOrMessages], desirable: bool, line: int) -> KTORecord:
    return KTORecord(prompt=side[0], response=side[1], desirable=desirable, line=line)


def _parse(raw: bytes) -> Row:
    try:
        text = raw.decode("utf-8-sig")
        row = json.loads(text)
        if "\\u" in text:  # only an escape can hide half a character, which no tokenizer takes
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RowError(f"not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise RowError(f"a row must be a JSON object, got {_show(row)}")
    return row


def _label(row: Row) -> bool:
    keys = [key for key in ("preference", "label") if key in row]
    if len(keys) != 1:
        raise RowError(
            'a row must have one of "preference" ("chosen" or "rejected") or "label" (true or false); '
            f"got the keys {sorted(row)}"
        )
    value = row[keys[0]]
    if keys[0] == "label":
        if not isinstance(value, bool):
            raise RowError(f'"label" must be true or false, got {_show(value)}; correct it or remove the row')
        return value
    if not isinstance(value, str) or value not in _PREFERENCES:
        raise RowError(f'"preference" must be "chosen" or "rejected", got {_show(value)}; correct it or remove the row')
    return _PREFERENCES[value]


def _pair_keys(row: Row) -> tuple[str, str] | None:
    """The keys of the chosen and the rejected side; None where the row has neither."""
    return next((keys for keys in _PAIR_KEYS if any(key in row for key in keys)), None)


def _pair(row: Row, good: str, bad: str) -> list[tuple[TextOrMessages, TextOrMessages]]:
    """(prompt, answer) of the chosen and of the rejected side."""
    if good not in row or bad not in row:
        missing = bad if good in row else good
        raise RowError(f'a pair must have "{good}" and "{bad}"; "{missing}" is missing')
    chosen, rejected = row[good], row[bad]
    if "prompt" in row:
        return [_prompt_and_answer(row["prompt"], row[key], key) for key in (good, bad)]
    if isinstance(chosen, str) and isinstance(rejected, str):
        cut = _shared_prompt(chosen, rejected, good, bad)
        return [(side[:cut], side[cut:]) for side in (chosen, rejected)]
    sides: list[tuple[TextOrMessages, TextOrMessages]] = [_conversation(row[key], key) for key in (good, bad)]
    if sides[0][0] != sides[1][0]:
        raise RowError(
            f'"{good}" and "{bad}" must be the same conversation up to their last message; '
            'give the row a "prompt" or make the messages before the answers equal'
        )
    return sides


def _shared_prompt(chosen: str, rejected: str, good: str, bad: str) -> int:
    """Length of the prompt two strings share: up to the last answer's mark if there is one, otherwise whole words."""
    shared = chosen[: _shared_length(chosen, rejected)]
    mark = shared.rfind(_DIALOGUE_ANSWER)
    if mark >= 0:
        return mark + len(_DIALOGUE_ANSWER)
    cut = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    if cut == 0 or chosen == rejected:
        sides = f"{_show(chosen)}, {_show(rejected)}"
        raise RowError(f'"{good}" and "{bad}" show no prompt that both share ({sides}); give the row a "prompt"')
    return cut


def _shared_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _prompt_and_answer(prompt: object, answer: object, key: str) -> tuple[TextOrMessages, TextOrMessages]:
    """Both sides brought to one kind: two strings, or messages and one assistant message."""
    if isinstance(answer, str) and isinstance(prompt, str):
        return prompt, answer
    if isinstance(answer, str):
        return _messages(prompt, "prompt"), [{"role": "assistant", "content": answer}]
    messages = _messages(answer, key)
    if isinstance(prompt, str):
        if len(messages) == 1:
            return [{"role": "user", "content": prompt}], _answer(messages, key)
        before, last = _conversation(messages, key)
        if all(message.get("content") != prompt for message in before):
            raise RowError(f'"{key}" is a conversation that does not hold the prompt {_show(prompt)}')
        return before, last
    before = _messages(prompt, "prompt")
    if len(messages) > len(before) and messages[: len(before)] == before:
        messages = messages[len(before) :]
    return before, _answer(messages, key)


def _conversation(value: object, key: str) -> tuple[list[Message], list[Message]]:
    """Messages up to the last, and the last, which is the answer."""
    messages = _messages(value, key)
    if len(messages) < 2:
        raise RowError(f'"{key}" must have at least one message before the answer, got {_show(value)}')
    return messages[:-1], _answer(messages[-1:], key)


def _answer(messages: list[Message], key: str) -> list[Message]:
    roles = [message["role"] for message in messages]
    if roles != ["assistant"]:
        raise RowError(f'the answer in "{key}" must be one message of the role "assistant", got the roles {roles}')
    return messages


def _messages(value: object, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise RowError(f'"{key}" must be a string or a list of messages that is not empty, got {_show(value)}')
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f'a message in "{key}" must be an object with "role" and "content", got {_show(message)}')
        if not isinstance(message.get("content"), str) and "tool_calls" not in message:
            raise RowError(f'"content" of a message in "{key}" must be a string, got {_show(message.get("content"))}')
    return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
