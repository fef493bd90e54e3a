"""Conversion of a row of a data file into a record: a prompt with one labelled answer, or with a chosen and a rejected one.

A KTO row may have any of these forms, a DPO row only the last:

    {"prompt": "...", "response": "...", "preference": "chosen" | "rejected"}
    {"prompt": "...", "completion": "...", "label": true | false}
    {"messages": [..., {"role": "assistant", ...}], "label": true | false}
    {"prompt": "...", "chosen": "...", "rejected": "..."}      a pair; also chosen_response, rejected_response

Labels may also have other values, see ``labels.py``. Each text may be a string, a list of messages or a single message; the
content of a message may be a list of text parts. A message may also be {"from": "human" | "gpt" | "system", "value": "..."}.
The prompt of a pair may be left out; it is then the common beginning of both sides. A pair may have "chosen_reward" and
"rejected_reward"; a row of messages may have "tools" and "chat_template_kwargs", which are passed to the chat template; any
row may have a "weight". ``reader.py`` defines how other columns are treated."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, cast

from nemo_kto.data.rows.labels import Labels, label_text
from nemo_kto.errors import UserError, printable, show

Row = Mapping[str, object]
Message = Mapping[str, object]
TextOrMessages = str | list[Message]

PAIR_KEYS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
REWARDS = ("chosen_reward", "rejected_reward")
ANSWERS = ("response", "completion")
TEMPLATE_KEYS = ("tools", "chat_template_kwargs")
WEIGHT = "weight"
SOURCE = "source"  # how a row was labelled; an object in the files of nemo-kto label
LABEL_COLUMNS = ("preference", "label")
# The columns that are interpreted; model.data.fields maps columns of other names to them.
COLUMNS = ("prompt", *ANSWERS, "messages", *LABEL_COLUMNS, *chain(*PAIR_KEYS), *REWARDS, *TEMPLATE_KEYS, WEIGHT)
# Arguments of apply_chat_template that are not template variables.
_NOT_FOR_TEMPLATES = frozenset(
    "conversation tools add_generation_prompt continue_final_message tokenize padding truncation max_length "
    "return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
COMMON_LABELS = Labels()
# Roles of the senders of messages in ShareGPT's form.
_SENDERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_SENDERS |= {"function_call": "assistant", "observation": "tool", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHTS = "reasoning_content"  # of a message, which templates read
_THOUGHT_PARTS = ("thinking", "reasoning")
_DIALOGUE_ANSWER = "\n\nAssistant:"  # begins an answer in a pair of strings without a "prompt", as in HH-RLHF
_FP32_MIN, _FP32_MAX = 2.0**-126, 2.0**128 - 2.0**104  # losses and their weights are in fp32


class DataError(UserError):
    """Error about data that cannot be used; the message names the rows or files, the reason and a remedy."""


class RowError(ValueError):
    """Error in one row; the reader of the file adds the file name and the line number."""


class LastRowError(RowError):
    """Error in one row that ends reading, because further rows could take as much time or memory."""


class LostTextError(RowError):
    """Error in one row, parts of which would not be trained, or not where the model writes them."""


class LabelError(RowError):
    """Error about a label that has none of the known values; it is reported once for all rows of a file."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    prompt: TextOrMessages  # plain text, or the messages before the answer
    line: int  # of the file, counted from 1; the two records of a pair have the same line
    template: Mapping[str, object] = field(default_factory=dict)  # chat template arguments: ``tools`` and variables
    weight: float = 1.0  # of the loss of this record


@dataclass(frozen=True, kw_only=True)
class KTORecord(_Record):
    """One prompt with one labelled answer: plain text, or one assistant message in a list if the prompt is messages."""

    response: TextOrMessages
    desirable: bool


@dataclass(frozen=True, kw_only=True)
class DPORecord(_Record):
    """One prompt with a chosen and a rejected answer; both rewards are None if the row has none."""

    chosen: TextOrMessages
    rejected: TextOrMessages
    chosen_reward: float | None
    rejected_reward: float | None

    @property
    def sides(self) -> tuple[KTORecord, KTORecord]:
        """The pair as two records: the prompt with the chosen answer, and the prompt with the rejected one."""
        shared: dict[str, Any] = {"prompt": self.prompt, "line": self.line, "template": self.template, "weight": self.weight}
        chosen = KTORecord(response=self.chosen, desirable=True, **shared)
        return chosen, KTORecord(response=self.rejected, desirable=False, **shared)


@dataclass(frozen=True, kw_only=True)
class PromptRecord(_Record):
    """One prompt without an answer."""


def prompt_of_row(row: Row, line: int) -> PromptRecord:
    """Return the prompt of a row without its answer, if it has one; RowError if the row has no prompt."""
    key = "messages" if "messages" in row else "prompt"
    if key not in row:
        raise RowError(f'a row must have "prompt" or "messages", got the keys {show(sorted(row), 300)}')
    prompt = cast(TextOrMessages, row[key] if isinstance(row[key], str) else _messages(row[key], key))
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise RowError(f'"{key}" must have text, or a message before the answer, got {show(row[key])}')
    return PromptRecord(prompt=prompt, line=line, template=_template(row, prompt))


def records_of_row(row: Row, line: int, labels: Labels = COMMON_LABELS) -> list[KTORecord]:
    """Return the record of a row, or the two of a pair (the desirable one first); RowError if the row is invalid."""
    if keys := _pair_keys(row):
        answers = list(zip(_pair(row, *keys), (True, False), strict=True))
    else:
        desirable = _label(row, labels)
        answer_keys = [key for key in ANSWERS if key in row]
        if "messages" in row:
            answers = [(_conversation(row["messages"], "messages"), desirable)]
        elif "prompt" in row and len(answer_keys) == 1:
            answers = [(_prompt_and_answer(row["prompt"], row[answer_keys[0]], answer_keys[0]), desirable)]
        else:
            raise RowError(
                'a row must have "prompt" and one of "response" or "completion", or "messages", or "chosen" and "rejected"; '
                f"got the keys {show(sorted(row), 300)}"
            )
    return [
        KTORecord(response=answer, desirable=desirable, **_shared(row, line, prompt))
        for (prompt, answer), desirable in answers
    ]


def pair_of_row(row: Row, line: int) -> DPORecord:
    """Return the pair of a row; RowError if it is not a pair, its sides have different prompts, or a value is invalid."""
    keys = _pair_keys(row)
    if keys is None:
        raise RowError(
            'a row must have "chosen" and "rejected" (or "chosen_response" and "rejected_response"), '
            f"got the keys {show(sorted(row), 300)}; unpaired feedback is for KTO"
        )
    (prompt, chosen), (other_prompt, rejected) = _pair(row, *keys)
    if prompt != other_prompt:
        good, bad = keys
        raise RowError(f'"{good}" and "{bad}" must answer the same prompt; make the messages before the answers equal')
    rewards: dict[str, Any] = dict.fromkeys(REWARDS, None) | {
        key: _number(row[key]) for key in REWARDS if row.get(key) is not None
    }
    for key, reward in rewards.items():
        if reward is not None and not math.isfinite(reward):
            raise RowError(f'"{key}" must be a finite number, got {show(row[key])}; correct it or remove both rewards')
    missing = [key for key, reward in rewards.items() if reward is None]
    if len(missing) == 1:
        raise RowError(f'a pair must have both "chosen_reward" and "rejected_reward" or neither; "{missing[0]}" is missing')
    return DPORecord(chosen=chosen, rejected=rejected, **rewards, **_shared(row, line, prompt))


@lru_cache(maxsize=1024)  # most rows of a file have the same columns
def used_columns(columns: tuple[str, ...], *, as_pair: bool) -> frozenset[str]:
    """Return the columns that are read from a row with the given columns; they may include columns that it does not have.

    The row is read by :func:`records_of_row`, or by :func:`pair_of_row` if ``as_pair`` is set.
    """
    if keys := _pair_keys(columns):
        read = {"prompt", *keys, *(REWARDS if as_pair else ())}
    elif "messages" in columns:
        read = {"messages", *LABEL_COLUMNS}
    else:
        read = {"prompt", *ANSWERS, *LABEL_COLUMNS}
    return frozenset(read | {*TEMPLATE_KEYS, WEIGHT})


def _shared(row: Row, line: int, prompt: TextOrMessages) -> dict[str, Any]:
    """Return the fields of a record that do not depend on its answers."""
    template, weight, value = _template(row, prompt), 1.0, row.get(WEIGHT)
    if value is not None and not _FP32_MIN <= (weight := _number(value)) <= _FP32_MAX:
        got = f"got {show(value)}; correct it or remove it"
        raise RowError(f'"{WEIGHT}" must be a number above 0 in the range of fp32, {got}')
    return {"prompt": prompt, "line": line, "template": template, "weight": weight}


def _number(value: object) -> float:
    """Return the value as a float; NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer with more than 308 digits
        return math.inf


def _template(row: Row, prompt: TextOrMessages) -> dict[str, object]:
    """Return the chat template arguments of a row."""
    given = [key for key in TEMPLATE_KEYS if row.get(key)]
    if not given:
        return {}
    if isinstance(prompt, str):
        raise RowError(f'"{given[0]}" needs a chat template, which strings do not have; make "prompt" a list of messages')
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise RowError(f'"chat_template_kwargs" must be an object, got {show(variables)}')
    if wrong := sorted(_NOT_FOR_TEMPLATES & variables.keys()):
        raise RowError(f'"chat_template_kwargs" must contain template variables only, got "{wrong[0]}"; remove it')
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f'"tools" must be a list of JSON schemas, or such a list as a JSON string, got {show(tools)}')
    return {**variables, **({"tools": tools} if tools else {})}


def _label(row: Row, labels: Labels) -> bool:
    columns = [column for column in LABEL_COLUMNS if column in row]
    if len(columns) != 1:
        raise RowError(
            'a row must have one of "preference" ("chosen" or "rejected") or "label" (true or false); '
            f"got the keys {show(sorted(row), 300)}"
        )
    if (desirable := labels.find(label_text(row[columns[0]]))) is None:
        raise LabelError(f'"{columns[0]}" must be a known label, got {show(row[columns[0]])}')
    return desirable


def _pair_keys(row: Collection[str]) -> tuple[str, str] | None:
    """Return the keys of the chosen and the rejected side; None if the row has neither."""
    return next((keys for keys in PAIR_KEYS if any(key in row for key in keys)), None)


def _pair(row: Row, good: str, bad: str) -> list[tuple[TextOrMessages, TextOrMessages]]:
    """Return (prompt, answer) of the chosen side and of the rejected side."""
    if good not in row or bad not in row:
        missing = bad if good in row else good
        raise RowError(f'a pair must have "{good}" and "{bad}"; "{missing}" is missing')
    chosen, rejected = row[good], row[bad]
    if "prompt" in row:
        return [_prompt_and_answer(row["prompt"], row[key], key) for key in (good, bad)]
    if isinstance(chosen, str) and isinstance(rejected, str):
        # The common prompt ends with the last answer marker if there is one, otherwise with a whole word.
        differs = (i for i, (x, y) in enumerate(zip(chosen, rejected, strict=False)) if x != y)
        shared = chosen[: next(differs, min(len(chosen), len(rejected)))]
        if (marker := shared.rfind(_DIALOGUE_ANSWER)) >= 0:
            end = marker + len(_DIALOGUE_ANSWER)
        else:
            end = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
            if end == 0 or chosen == rejected:
                got = f"{show(chosen)}, {show(rejected)}"
                raise RowError(f'"{good}" and "{bad}" must begin with the same prompt, got {got}; give the row a "prompt"')
        return [(side[:end], side[end:]) for side in (chosen, rejected)]
    sides = [_conversation(row[key], key) for key in (good, bad)]
    if sides[0][0] != sides[1][0]:
        raise RowError(
            f'"{good}" and "{bad}" must be the same conversation up to their last message; '
            'give the row a "prompt" or make the messages before the answers equal'
        )
    return sides


def _prompt_and_answer(prompt: object, answer: object, key: str) -> tuple[TextOrMessages, TextOrMessages]:
    """Return prompt and answer in the same form: two strings, or messages and one assistant message."""
    if isinstance(answer, str) and isinstance(prompt, str):
        return prompt, answer
    if isinstance(answer, str):
        return _messages(prompt, "prompt"), [{"role": "assistant", "content": answer}]
    messages = _messages(answer, key)
    if isinstance(prompt, str):
        if len(messages) == 1:
            return [{"role": "user", "content": prompt}], _answer(messages, key)
        before, last = _conversation(messages, key)
        if not any(isinstance(message, dict) and message.get("content") == prompt for message in before):
            raise RowError(f'"{key}" must contain the prompt, got a conversation without {show(prompt)}')
        return before, last
    before = _messages(prompt, "prompt")
    if len(messages) > len(before) and messages[: len(before)] == before:
        messages = messages[len(before) :]
    return before, _answer(messages, key)


def _conversation(value: object, key: str) -> tuple[TextOrMessages, TextOrMessages]:
    """Return the messages before the last one, and the last one, which is the answer."""
    messages = _messages(value, key)
    if len(messages) < 2:
        raise RowError(f'"{key}" must have at least one message before the answer, got {show(value)}')
    return messages[:-1], _answer(messages[-1:], key)


def _answer(messages: list[Message], key: str) -> list[Message]:
    roles = [message["role"] for message in messages]
    if roles != ["assistant"]:
        raise RowError(f'the answer in "{key}" must be one message of the role "assistant", got the roles {roles}')
    return messages


def _messages(value: object, key: str) -> list[Message]:
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        raise RowError(f'"{key}" must be a string or a list of messages that is not empty, got {show(value)}')
    messages = [_with_role(message, key) for message in value]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f'a message in "{key}" must be an object with "role" and "content", got {show(message)}')
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise RowError(f'"content" of a message in "{key}" must be a string, got {show(message.get("content"))}')
    return [_with_arguments(_with_text(message, key), key) for message in messages]


def _with_role(message: Any, key: str) -> Any:
    """Return a message in ShareGPT's form, {"from": "human", "value": ...}, with role and content; others are unchanged."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    sender = message["from"]
    if not isinstance(sender, str) or sender not in _SENDERS:
        senders = ", ".join(_SENDERS)
        raise RowError(f'"from" of a message in "{key}" must be one of {senders}, got {show(sender)}; write "role" instead')
    if sender != "function_call":
        return {"role": _SENDERS[sender], "content": message.get("value")}
    calls: object = None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        calls = json.loads(str(message.get("value")))
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) and "name" in call for call in calls):
        wanted = f'a function_call in "{key}" must be an object with "name" and "arguments" in JSON, or a list of them'
        raise RowError(f"{wanted}, got {show(message.get('value'))}; correct it, or leave the row out")
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def is_conversation_with_answer(value: object) -> bool:
    """Return whether a value is a list of messages, the last of which is from the assistant."""
    last = value[-1] if isinstance(value, list) and len(value) > 1 else None
    return isinstance(last, dict) and "assistant" in (last.get("role"), _SENDERS.get(str(last.get("from"))))


def _with_text(message: Message, key: str) -> Message:
    """Return a message whose content is one string, joined from text parts, and whose thoughts are beside it."""
    if isinstance(message.get("reasoning"), str) and _THOUGHTS not in message:  # as vLLM and OpenRouter name it
        message = {
            **{name: value for name, value in message.items() if name != "reasoning"},
            _THOUGHTS: message["reasoning"],
        }
    if not isinstance(content := message.get("content"), list):
        return message
    texts, thoughts = list[str](), list[str]()
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get(kind if kind in _THOUGHT_PARTS else "text") if isinstance(part, dict) else None
        if kind == "thinking" and isinstance(text, list):  # Mistral's form has text parts there, too
            text = "".join(str(each.get("text", "")) for each in text if isinstance(each, dict))
        if kind not in (*_TEXT_PARTS, *_THOUGHT_PARTS) or not isinstance(text, str):
            raise RowError(
                f'"content" of a message in "{key}" must be a string, or a list of {{"type": "text", "text": ...}}, got '
                f"{show(part)}; models are trained on text only, leave such rows out"
            )
        (thoughts if kind in _THOUGHT_PARTS else texts).append(text)
    return {**message, "content": "".join(texts), **({_THOUGHTS: "".join(thoughts)} if thoughts else {})}


def _with_arguments(message: Message, key: str) -> Message:
    """Return a message in which the arguments of tool calls are objects, as servers give them to a chat template.

    OpenAI's form has them as JSON in a string, which most templates would write as a string with escapes.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(isinstance(_function(call).get("arguments"), str) for call in calls):
        return message
    parsed = []
    for call in calls:
        function = _function(call)
        if isinstance(text := function.get("arguments"), str):
            with contextlib.suppress(ValueError, RecursionError):
                function = {**function, "arguments": json.loads(text) if text.strip() else {}}
            if not isinstance(function["arguments"], dict):
                wanted = f'"arguments" of a tool call in "{key}" must be an object, or one in JSON'
                raise RowError(f"{wanted}, got {show(text)}; correct it, or leave the row out")
            call = {**call, "function": function} if "function" in call else function
        parsed.append(call)
    return {**message, "tool_calls": parsed}


def _function(call: object) -> Mapping[str, Any]:
    """Return name and arguments of a tool call, which are in its field "function" or beside its other fields."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    return function if isinstance(function, dict) else {}


UNLABELLED, EMPTY_ANSWERS, LOST_TEXT = "unlabelled", "empty_answers", "lost_text"
DUPLICATES, CONTRADICTIONS = "duplicates", "contradictions"
# Each kind of row, described for a message.
DROPS = {
    UNLABELLED: "without a label",
    EMPTY_ANSWERS: "with an empty answer",
    LOST_TEXT: "with text that the chat template leaves out or misplaces",
    DUPLICATES: "equal to an earlier one",
    CONTRADICTIONS: "whose answer also has the other label, or of a pair whose answers are also swapped",
}
DEFAULT_DROPS = (UNLABELLED,)


def check_drops(kinds: Collection[str]) -> None:
    """Raise UserError unless all are keys of :data:`DROPS`."""
    if unknown := sorted(set(kinds) - set(DROPS)):
        raise UserError(f"must list names out of {', '.join(DROPS)}, got {printable(unknown[0], 60)}; [] keeps all rows")


def drop_text(counts: Mapping[str, int]) -> str:
    """Return the numbers of rows that were left out, such as "3 rows without a label"; empty if there are none."""
    return ", ".join(f"{count:,} row{'s' * (count != 1)} {DROPS[kind]}" for kind, count in counts.items() if count)


def is_empty_answer(answer: str | Sequence[Mapping[str, object]]) -> bool:
    """Return whether an answer has neither text nor calls."""
    if isinstance(answer, str):
        return not answer.strip()
    return not any(message.get("tool_calls") or str(message.get("content") or "").strip() for message in answer)
