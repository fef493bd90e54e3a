"""Content of messages as chat templates read it: a text or a list of parts, with thoughts in it or in a field beside it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

BEGIN_OF_THOUGHTS, END_OF_THOUGHTS = "<think>", "</think>"
FIELDS = ("reasoning_content", "reasoning", "thinking")  # of a message with thoughts beside its content
# Forms of an answer: as it is in the row; thoughts in its content, with their beginning or (as a model writes them after a
# prompt that begins them) without; or in one of FIELDS.
GIVEN, WITH_BEGINNING, CONTINUED = "given", "with_beginning", "continued"
# Of a drawn message: its tokens before the one that ends it, if its text alone gives others.
TOKEN_IDS = "token_ids"  # nosec B105
MARK = "8f14e45fceea167a"  # stands for a text in a rendering that shows where the template puts it
NO_THOUGHTS = f"{MARK}n"  # stands for the thoughts of an answer that has none
_NAMES = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")  # which templates join to texts


def in_form_of(template: str, messages: Sequence[Any]) -> list[Any]:
    """Return messages with each text as a list of one part, if the template reads only parts; else as they are."""
    return as_parts(messages) if _reads_parts(template) else list(messages)


def as_parts(messages: Sequence[Any]) -> list[Any]:
    """Return messages with each text as a list of one part."""
    contents = [message.get("content") for message in messages]
    return [
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
        for message, content in zip(messages, contents, strict=True)
    ]


@functools.cache
def _reads_parts(template: str) -> bool:
    """Return whether a template writes the content of a message only as parts.

    Such a template takes the characters of a text for parts, and writes nothing or raises an error.
    """
    turns: list[Mapping[str, Any]] = [{"role": "user", "content": MARK}, {"role": "assistant", "content": "!"}]
    with_mark = [False, False]
    for number, each in enumerate((turns, as_parts(turns))):
        with contextlib.suppress(Exception):  # a template is a program and may raise any exception
            with_mark[number] = MARK in rendered(template, each, _NAMES).lower()
    return with_mark == [False, True]


def rendered(template: str, turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Return turns as a template writes them; raises any exception."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([list(turns)], chat_template=template, **variables)
    return str(text)


def field_of_thoughts(message: Mapping[str, Any]) -> str | None:
    """Return the field beside the content that has the thoughts of a message; None if there is none."""
    return next((name for name in FIELDS if isinstance(message.get(name), str) and message[name].strip()), None)


def has_thoughts(message: Mapping[str, Any]) -> bool:
    """Return whether a message has thoughts, in its content or beside it."""
    return field_of_thoughts(message) is not None or END_OF_THOUGHTS in str(message.get("content"))


def in_form(message: Mapping[str, Any], form: str) -> Mapping[str, Any]:
    """Return an answer with its thoughts in a form; ``NO_THOUGHTS`` if it has none, unless the form is ``GIVEN``."""
    if form == GIVEN:
        return message
    rest, content = {**message}, str(message.get("content") or "")
    if (name := field_of_thoughts(message)) is not None:
        thoughts, text = rest[name].strip("\n") + "\n", f"\n\n{content}"
    elif END_OF_THOUGHTS in content:
        thoughts, _, text = content.partition(END_OF_THOUGHTS)
        thoughts = thoughts.removeprefix(BEGIN_OF_THOUGHTS)
    else:
        thoughts, text = f"{NO_THOUGHTS}\n", f"\n\n{content}"
    for each in FIELDS:
        rest.pop(each, None)
    if form in FIELDS:
        return {**rest, form: thoughts.strip("\n"), "content": text.lstrip("\n")}
    begin = f"{BEGIN_OF_THOUGHTS}\n" if form == WITH_BEGINNING else ""
    return {**rest, "content": f"{begin}{thoughts.lstrip()}{END_OF_THOUGHTS}{text}"}
