"""Answers that a model has drawn, in the form in which rows keep them: as the tokens that were drawn."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_kto.data.rows.records import KTORecord, Message, TextOrMessages
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.rendering import MARK, TOKEN_IDS, parse_bounded
from nemo_kto.data.tokens.workers import LimitError, WorkError

_THOUGHTS = ("reasoning_content", "thinking")  # names of the field in chat templates
_CONTENT, _THOUGHT, _NAME = (f"{MARK}{letter}" for letter in "CTN")
_KEYS, _VALUES = ([f"{MARK}{letter}{number}" for number in (1, 2)] for letter in "KV")
_PARTS = {"content": "content", **dict.fromkeys(_THOUGHTS, "thoughts"), "tool_calls": "calls"}  # of a rendering
_CALL = [{"type": "function", "function": {"name": _NAME, "arguments": dict(zip(_KEYS, _VALUES, strict=True))}}]
# Messages whose rendering shows where a template writes each of their parts, those with fewer parts first.
_PROBES: Sequence[Message] = [
    {"role": "assistant", **content, **thoughts, **calls}
    for calls in ({}, {"tool_calls": _CALL})
    for content in ({"content": ""}, {"content": _CONTENT})
    for thoughts in ({}, *({name: _THOUGHT} for name in _THOUGHTS))
    if content["content"] or thoughts or calls
]


@dataclass(frozen=True, kw_only=True)
class DrawnAnswer:
    """An answer that was drawn.

    Attributes:
        text: what the model wrote before the token that ends the answer, with all special tokens.
        answer: the answer of a row: the text, or a message with thoughts and tool calls in a list.
        is_same: whether the row has the tokens that were drawn.
    """

    text: str
    answer: TextOrMessages
    is_same: bool


def drawn_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_ids: Collection[int], *, before: Sequence[int] = ()
) -> str:
    """Return the text of drawn tokens up to the first that ends an answer, with all other special tokens.

    ``before`` are the tokens of the prompt: some decoders leave out the space before the first word of a text.
    """
    last, (drawn, _) = list(before[-1:]), _cut(ids, stop_ids)
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    known, whole = str(decode(last)), str(decode(last + drawn))
    return whole.removeprefix(known) if whole.startswith(known) else str(decode(drawn))


def _cut(ids: Sequence[int], stop_ids: Collection[int]) -> tuple[list[int], list[int]]:
    """Return the tokens before the first that ends an answer, and this one in a list, which is empty if there is none."""
    end = next((place for place, token in enumerate(ids) if token in stop_ids), len(ids))
    return list(ids[:end]), list(ids[end : end + 1])


def read_drawn(
    encoder: RecordEncoder,
    tokenizer: PreTrainedTokenizerBase,
    prompt: TextOrMessages,
    ids: Sequence[int],
    *,
    prompt_ids: Sequence[int],
    stop_ids: Collection[int],
    variables: Mapping[str, object],
) -> DrawnAnswer:
    """Return a drawn answer in the form that the chat template writes as the same text after the same prompt.

    This is its text, or else the message that the tokenizer's response template or the rendering of a message with marks
    finds in it; with its tokens, if the text alone would become others, because it can be divided into tokens in several
    ways or the template removes white space around it. If the template cannot write the answer, it stays a text.
    """

    def encoded(answer: TextOrMessages) -> list[int]:  # without tokens if the template refuses it, or changes the prompt
        response = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        given: Any = {"prompt": prompt, "response": answer if isinstance(prompt, str) else response, "template": variables}
        (example,) = encoder.encode([KTORecord(**given, desirable=True, line=1)])
        if not isinstance(example, EncodedExample) or example.prompt_ids != list(prompt_ids):
            return []
        return example.response_ids

    read = partial(drawn_text, tokenizer, stop_ids=stop_ids, before=prompt_ids)
    (drawn, stop), text = _cut(ids, stop_ids), read(ids)
    prefix = str(tokenizer.decode(prompt_ids, skip_special_tokens=False))
    nearest: TextOrMessages | None = None
    for answer in [text] if isinstance(prompt, str) else _forms(text, tokenizer, prefix, lambda each: read(encoded(each))):
        if (found := read(ids_of := encoded(answer))).strip() != text.strip():
            continue
        body, end = _cut(ids_of, stop_ids)
        if body == drawn and stop in ([], end):
            return DrawnAnswer(text=text, answer=answer, is_same=True)
        nearest = answer if nearest is None else nearest
        if found == text and stop in ([], end):  # only the division into tokens differs
            nearest = answer
            break
    if nearest is None or isinstance(prompt, str):
        return DrawnAnswer(text=text, answer=text, is_same=False)
    message = {"role": "assistant", "content": nearest} if isinstance(nearest, str) else nearest[0]
    with_ids: TextOrMessages = [{**message, TOKEN_IDS: drawn}]
    body, end = _cut(encoded(with_ids), stop_ids)
    is_same = body == drawn and stop in ([], end)
    return DrawnAnswer(text=text, answer=with_ids if body == drawn else nearest, is_same=is_same)


def _forms(
    text: str, tokenizer: PreTrainedTokenizerBase, prompt: str, written: Callable[[list[Message]], str]
) -> Iterator[TextOrMessages]:
    """Yield the forms that a drawn text may have in a row; ``written`` returns the text of a message after the prompt."""
    yield from dict.fromkeys((text.strip(), text))
    if pattern := getattr(tokenizer, "response_template", None):
        with contextlib.suppress(LimitError, WorkError):  # it has patterns and conversions of the model's author
            yield _plain({"content": "", **parse_bounded(pattern, text, prefix=prompt)})
    for message in _PROBES:
        found = _parts(written([message]), text)
        if found and all(part in found for name, part in _PARTS.items() if message.get(name)):
            yield _plain({name: found.get(part, "") for name, part in _PARTS.items() if name in message})


def _plain(message: Message) -> TextOrMessages:
    """Return a message of the assistant as the answer of a row, which is a text if it has only content."""
    message = {"role": "assistant", **message}
    return str(message["content"]) if message.keys() == {"role", "content"} else [message]


def _parts(rendered: str, text: str) -> dict[str, Any]:
    """Return the parts of a text that are where marks are in a rendered message; none if the text differs elsewhere."""
    pattern, between, after = re.escape(rendered), "", ""
    for mark, name in ((_CONTENT, "content"), (_THOUGHT, "thoughts"), (_NAME, "name")):
        pattern = pattern.replace(mark, f"(?P<{name}>.*?)", 1).replace(mark, f"(?P={name})")
    if _NAME in rendered:
        (first, second), (_, value) = _KEYS, _VALUES
        in_json = re.search(rf"\{{\s*\"{first}\".*\"{value}\"\s*\}}", rendered, re.DOTALL)
        in_tags = re.search(rf"{first}(?P<between>.*){_VALUES[0]}(.*){second}(?P=between){value}", rendered, re.DOTALL)
        if (arguments := in_json or in_tags) is None:
            return {}
        pattern = pattern.replace(re.escape(arguments[0]), "(?P<arguments>.*)", 1)
        between, after = arguments.groups() or ("", "")
    if MARK in pattern or (match := re.fullmatch(pattern, text, re.DOTALL)) is None:
        return {}
    found: dict[str, Any] = match.groupdict()
    if (values := found.get("arguments")) is not None:
        try:
            values = dict(each.split(between, 1) for each in values.split(after)) if between else json.loads(values)
        except ValueError:
            return {}
        found["calls"] = [{"type": "function", "function": {"name": found["name"], "arguments": values}}]
    return found
