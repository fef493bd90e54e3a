"""The answer of a row as the text with which a model continues the prompt of inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nemo_kto.data.rows.records import RowError
from nemo_kto.data.tokens.message_content import BEGIN_OF_THOUGHTS, END_OF_THOUGHTS, MARK

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
    render: Render,
    prompt: Messages,
    answer: Mapping[str, Any],
    variables: Mapping[str, Any],
    shown: str,
    whole: str,
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
