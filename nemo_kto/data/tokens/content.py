"""Content of messages in the form that a chat template reads: a text, or a list of parts, as for models with image input."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

BEGIN_OF_THOUGHTS, _END_OF_THOUGHTS = "<think>", "</think>"
_THOUGHTS = "reasoning_content"  # of a message, for templates that know it
TOKEN_IDS = "token_ids"  # of a drawn message: its tokens before the one that ends it, if its text alone gives others
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
    as_texts, in_parts = (MARK in (_rendered(template, each) or "").lower() for each in (turns, as_parts(turns)))
    return in_parts and not as_texts


def _rendered(template: str, turns: Sequence[Mapping[str, Any]]) -> str | None:
    """Return turns as a template writes them; None if it refuses them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template([list(turns)], chat_template=template, **_NAMES)
    except Exception:  # a template is a program and may raise any exception
        return None
    return str(text)


def has_thoughts(answer: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message of an answer has thoughts, in its content or beside it."""
    return any(message.get(_THOUGHTS) or _END_OF_THOUGHTS in str(message.get("content")) for message in answer)


def with_thoughts(template: str, answer: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return an answer to a prompt that begins thoughts, with those in its content as the template reads them.

    The model begins them in the prompt, so that what it wrote has only their end. Most templates read thoughts with their
    beginning in the content, others (Qwen3.8) only beside it.
    """
    turns = []
    for message in answer:
        thoughts, end, text = str(message.get("content")).partition(_END_OF_THOUGHTS)
        thoughts = thoughts.removeprefix(BEGIN_OF_THOUGHTS)
        if not end:
            turns.append(message)
        elif _THOUGHTS in template and not _reads_thoughts(template):
            turns.append({**message, _THOUGHTS: thoughts.strip("\n"), "content": text.lstrip("\n")})
        else:
            turns.append({**message, "content": f"{BEGIN_OF_THOUGHTS}\n{thoughts.lstrip()}{end}{text}"})
    return turns


@functools.cache
def _reads_thoughts(template: str) -> bool:
    """Return whether a template writes thoughts in the content of a message as they are, without others before them."""
    content = f"{BEGIN_OF_THOUGHTS}\n{MARK}\n{_END_OF_THOUGHTS}\n\n!"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
    return (_rendered(template, turns) or "").count(BEGIN_OF_THOUGHTS) == 1
