"""Messages as chat templates read and write them: content, thoughts, limits, and the answer that continues a prompt."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nemo_kto.data.rows.records import RowError
from nemo_kto.data.tokens.workers import BoundedProcess

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


MAX_SECONDS: float = 2  # of CPU time for a rendering; a typical one takes a ten-thousandth of it
MAX_CHARACTERS = 10**7  # of a rendered row
REMEDY = "correct the template, or write the row as plain strings (with model.data.apply_chat_template=false)"
renderer = BoundedProcess(imports=(__name__, "transformers.utils.chat_template_utils"), max_bytes=2**30)


def render_bounded(
    template: str, messages: Sequence[Any], variables: Mapping[str, Any], *, add_generation_prompt: bool
) -> str:
    """Return messages as a template writes them; LimitError at a limit, WorkError if it refuses them."""
    # as apply_chat_template does
    turns = [{name: value for name, value in message.items() if value is not None} for message in messages]
    given = {**variables, "add_generation_prompt": add_generation_prompt}
    return str(renderer(_render, template, turns, given, max_seconds=MAX_SECONDS))


def parse_bounded(template: Any, text: str, *, prefix: str) -> dict[str, Any]:
    """Return the message that the response template of a tokenizer finds in a drawn text; raises as the above."""
    return dict(renderer(_parse, template, text, prefix, max_seconds=MAX_SECONDS))


def _render(template: str, turns: Sequence[Any], variables: Mapping[str, Any]) -> str:
    return rendered(template, in_form_of(template, turns), variables)[: MAX_CHARACTERS + 1]


def _parse(template: Any, text: str, prefix: str) -> Any:
    from transformers.utils.chat_parsing import parse_response

    return parse_response(text, template, prefix=prefix)


_ANSWER = f"{MARK}a"
Messages = Sequence[Mapping[str, Any]]


class Render(Protocol):
    """Rendering of messages with template variables by a chat template; RowError if the template refuses them."""

    def __call__(self, messages: Messages, variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str: ...


def begins_thoughts(prompt: str) -> bool:
    """Return whether the prompt of inference begins the thoughts of its answer."""
    return prompt.rstrip().endswith(BEGIN_OF_THOUGHTS)


def continue_prompt(
    render: Render, prompt: Messages, answer: Mapping[str, Any], variables: Mapping[str, Any], *, shown: str
) -> tuple[str, str | None]:
    """Return all messages in one text, and the answer as it continues the prompt of inference, ``shown``.

    The answer is None if it is ambiguous where it begins.
    """
    whole = render([*prompt, answer], variables, add_generation_prompt=False)
    if whole.startswith(shown):
        return whole, whole[len(shown) :]
    return whole, _answer_after(render, prompt, answer, variables, shown, whole)


def _answer_after(
    render: Render, prompt: Messages, answer: Mapping[str, Any], variables: Mapping[str, Any], shown: str, whole: str
) -> str | None:
    """Return the answer as it follows the prompt of inference, if the template renders the prompt otherwise before it.

    Such a template puts the system message into the last message (Mistral), leaves thoughts of earlier answers out
    (gpt-oss), or begins the answer in the prompt and leaves its thoughts out afterwards (DeepSeek-R1). The answer ends as
    the template ends it. None if it is ambiguous where the answer begins.
    """
    content, last = answer.get("content"), str(prompt[-1].get("content") or "").strip()
    end = shown[shown.rfind(last) :] if last and last in shown else None  # of the prompt, from its last text on
    if not isinstance(content, str) or answer.keys() - {"role", "content"}:
        is_opened = shown != render(prompt, variables, add_generation_prompt=False)  # else the end may be too short
        return whole.rpartition(end)[2] if is_opened and end is not None and end in whole else None
    try:
        marked = render([*prompt, {"role": "assistant", "content": _ANSWER}], variables, add_generation_prompt=False)
    except RowError:
        return None
    head, *tails = marked.split(_ANSWER)
    if len(tails) != 1:
        return None
    (tail,) = tails
    rendered = whole[len(head) : len(whole) - len(tail)] if whole.startswith(head) and whole.endswith(tail) else content
    rendered = rendered if rendered.strip() == content.strip() else content
    if begins_thoughts(shown) and END_OF_THOUGHTS in content and head.startswith(shown[: shown.rindex(BEGIN_OF_THOUGHTS)]):
        return rendered.removeprefix(f"{BEGIN_OF_THOUGHTS}\n") + tail  # an answer without them may close them before
    if shown.startswith(head):  # the prompt also has the beginning of the answer
        begun = shown[len(head) :]
        return rendered.removeprefix(begun if rendered.startswith(begun) else begun.rstrip()) + tail
    return head.rpartition(end)[2] + rendered + tail if end is not None and end in head else None
