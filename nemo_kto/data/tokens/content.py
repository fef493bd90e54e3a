"""Content of messages in the form that a chat template reads: a text, or a list of parts, as for models with image input."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "8f14e45fceea167a"  # stands for a text in a rendering that shows where the template puts it
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
    return not _writes(template, turns) and _writes(template, as_parts(turns))


def _writes(template: str, turns: Sequence[Mapping[str, Any]]) -> bool:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template([list(turns)], chat_template=template, **_NAMES)
    except Exception:  # a template is a program and may raise any exception
        return False
    return MARK in text.lower()
