"""Answers that a model has drawn, in the form in which rows keep them: as the tokens that were drawn."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_kto.data.rows.records import KTORecord, Message, TextOrMessages
from nemo_kto.data.tokens.chat import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.content import MARK

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
        answer: its text, or a message with thoughts and tool calls in a list, as the answer of a row.
        is_same: whether the row has the tokens that were drawn. Others have the same text, if a template can write it.
    """

    answer: TextOrMessages
    is_same: bool


def drawn_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_ids: Collection[int], *, before: Sequence[int] = ()
) -> str:
    """Return the text of drawn tokens up to the first that ends an answer, with all other special tokens.

    ``before`` are the tokens of the prompt: some decoders leave out the space before the first word of a text.
    """
    last, (drawn, _) = list(before[-1:]), _cut(ids, stop_ids)
    known, whole, alone = (
        str(tokenizer.decode(each, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for each in (last, last + drawn, drawn)
    )
    return whole.removeprefix(known) if whole.startswith(known) else alone


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
    finds in it. If the template cannot write the answer, it stays a text.
    """

    def encoded(answer: TextOrMessages) -> list[int] | None:
        response = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        given: Any = {"prompt": prompt, "response": answer if isinstance(prompt, str) else response, "template": variables}
        (example,) = encoder.encode([KTORecord(**given, desirable=True, line=1)])
        if not isinstance(example, EncodedExample) or example.prompt_ids != list(prompt_ids):
            return None
        return example.response_ids

    def written(answer: TextOrMessages) -> str | None:
        return None if (found := encoded(answer)) is None else drawn_text(tokenizer, found, stop_ids, before=prompt_ids)

    (drawn, stop), text = _cut(ids, stop_ids), drawn_text(tokenizer, ids, stop_ids, before=prompt_ids)
    prefix = str(tokenizer.decode(prompt_ids, skip_special_tokens=False))
    best = DrawnAnswer(answer=text, is_same=False)
    for answer in [text] if isinstance(prompt, str) else _forms(text, tokenizer, prefix, written):
        if (found := encoded(answer)) is None or drawn_text(tokenizer, found, stop_ids, before=prompt_ids) != text:
            continue
        body, end = _cut(found, stop_ids)
        best = DrawnAnswer(answer=answer, is_same=body == drawn and stop in ([], end))
        if stop in ([], end):  # a text may have several divisions into tokens, of which a file keeps none
            break
    return best


def _forms(
    text: str, tokenizer: PreTrainedTokenizerBase, prompt: str, written: Callable[[list[Message]], str | None]
) -> Iterator[TextOrMessages]:
    """Yield the forms that a drawn text may have in a row; ``written`` returns the text of a message after the prompt."""
    yield from dict.fromkeys((text.strip(), text))
    if getattr(tokenizer, "response_template", None):
        with contextlib.suppress(Exception):  # it has patterns and conversions of the model's author
            yield _plain({"content": "", **tokenizer.parse_response(text, prefix=prompt)})
    for message in _PROBES:
        rendered = written([message])
        if rendered is None or (found := _parts(rendered, text)) is None:
            continue
        if all(part in found for name, part in _PARTS.items() if message.get(name)):
            yield _plain({name: found.get(part, "") for name, part in _PARTS.items() if name in message})


def _plain(message: Message) -> TextOrMessages:
    """Return a message of the assistant as the answer of a row, which is a text if it has only content."""
    message = {"role": "assistant", **message}
    return str(message["content"]) if message.keys() == {"role", "content"} else [message]


def _parts(rendered: str, text: str) -> dict[str, Any] | None:
    """Return the parts of a text that are where marks are in a rendered message; None if the text differs elsewhere."""
    pattern, between, after = re.escape(rendered), "", ""
    for mark, name in ((_CONTENT, "content"), (_THOUGHT, "thoughts"), (_NAME, "name")):
        pattern = pattern.replace(mark, f"(?P<{name}>.*?)", 1).replace(mark, f"(?P={name})")
    if _NAME in rendered:
        (first, second), (_, value) = _KEYS, _VALUES
        in_json = re.search(rf"\{{\s*\"{first}\".*\"{value}\"\s*\}}", rendered, re.DOTALL)
        in_tags = re.search(rf"{first}(?P<between>.*){_VALUES[0]}(.*){second}(?P=between){value}", rendered, re.DOTALL)
        if (arguments := in_json or in_tags) is None:
            return None
        pattern = pattern.replace(re.escape(arguments[0]), "(?P<arguments>.*)", 1)
        between, after = arguments.groups() or ("", "")
    if MARK in pattern or (match := re.fullmatch(pattern, text, re.DOTALL)) is None:
        return None
    found: dict[str, Any] = match.groupdict()
    if "arguments" in found:
        try:
            values = _values(found["arguments"], between, after) if between else json.loads(found["arguments"])
        except ValueError:
            return None
        found["calls"] = [{"type": "function", "function": {"name": found["name"], "arguments": values}}]
    return found


def _values(arguments: str, between: str, after: str) -> dict[str, str]:
    """Return the values of arguments by their names: ``between`` separates both, ``after`` one from the next."""
    return dict(argument.split(between, 1) for argument in arguments.split(after))
