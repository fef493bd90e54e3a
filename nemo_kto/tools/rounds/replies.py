"""Answers in the replies of servers with OpenAI's interface: their text and thoughts, or why a reply has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nemo_kto.data.rows.records import TextOrMessages
from nemo_kto.errors import show

THOUGHTS = "reasoning_content"  # of a message, as chat templates read it
_THOUGHTS_FIELDS = (THOUGHTS, "reasoning")  # vLLM from 0.19 on and OpenRouter have the second one
_THOUGHTS_PARTS = ("thinking", "reasoning")  # of content that is a list of parts, such as Mistral's
_CUT = "length"
_FILTERED = frozenset({"content_filter", "sensitive"})
# of an answer that the server could not end; OpenRouter, vLLM and SGLang, DeepSeek, Z.ai
_BROKEN_OFF = frozenset({"error", "abort", "insufficient_system_resource", "network_error"})
_LEAVE_OUT = "leave the prompt out"


class Reply(NamedTuple):
    """An answer of a server: a text, or a list with a message that has thoughts."""

    answer: TextOrMessages
    finish: str  # "stop", "length" or another reason of the server
    left_out: Sequence[str] = ()  # settings that the server was not given

    @property
    def text(self) -> str:
        """The answer without its thoughts."""
        return self.answer if isinstance(self.answer, str) else str(self.answer[0]["content"])


class NoAnswer(NamedTuple):
    """Why a reply of a server has no answer."""

    got: str
    remedy: str = f"repeat the command, or {_LEAVE_OUT}"
    may_pass: bool = False  # whether the same request may have an answer later
    refusal: str = ""  # the server's text about a request that it does not accept


def read_reply(content: Any) -> Reply | NoAnswer:
    """Return the answer in the JSON of a reply, or why it has none.

    An answer has text. A tool call, a refusal, thoughts without an answer, and what a filter has left over are none.
    """
    try:
        if content.get("error"):
            raise LookupError
        choice = content["choices"][0]
        message, finish = choice["message"], str(choice.get("finish_reason"))
        text, thoughts, refusal = map("".join, _parts(message.get("content")))
        refusal = message.get("refusal") or refusal
        thoughts = next((each for name in _THOUGHTS_FIELDS if isinstance(each := message.get(name), str) and each), thoughts)
        calls = message.get("tool_calls") or message.get("function_call")
    except (LookupError, TypeError, AttributeError):
        return NoAnswer(f"a reply with status 200 and no answer: {show(content, 200)}", may_pass=True)
    except ValueError as error:
        return NoAnswer(str(error), _LEAVE_OUT)
    if choice.get("error") or finish in _BROKEN_OFF:
        return NoAnswer(f"an answer that broke off: {show(choice.get('error') or finish, 200)}", may_pass=True)
    if calls:
        return NoAnswer(f"a tool call: {show(calls, 200)}", f"serve the model without tools, or {_LEAVE_OUT}")
    if refusal:
        return NoAnswer(f"a refusal: {show(refusal, 200)}", _LEAVE_OUT)
    if finish in _FILTERED:
        return NoAnswer(f"an answer that a filter has cut: finish_reason {finish}", _LEAVE_OUT)
    is_empty = not (text.strip() if thoughts else text)
    if is_empty and finish == _CUT:
        remedy = "allow more tokens, or any number with --leave-out max_tokens"
        return NoAnswer(f"thoughts that are cut before the answer: finish_reason {finish}", remedy)
    if is_empty and thoughts:
        return NoAnswer(f"thoughts without an answer: finish_reason {finish}", _LEAVE_OUT)
    if message.get("content") is None:
        return NoAnswer(f"null as content: finish_reason {finish}", _LEAVE_OUT)
    return Reply([{"role": "assistant", "content": text, THOUGHTS: thoughts}] if thoughts else text, finish)


def _parts(content: Any) -> tuple[list[str], list[str], list[str]]:
    """Return the texts, thoughts and refusals of content: a text, a list of parts, or null; ValueError for other parts."""
    texts, thoughts, refusals = list[str](), list[str](), list[str]()
    parts: list[Any] = content if isinstance(content, list) else [content or ""]
    for part in parts:
        kind = "text" if isinstance(part, str) else part.get("type", "text")
        if kind in _THOUGHTS_PARTS:
            thoughts += _parts(part.get(kind, part.get("text")))[0]
        elif kind in ("text", "output_text", "refusal"):
            text = part if isinstance(part, str) else part["refusal" if kind == "refusal" else "text"]
            (refusals if kind == "refusal" else texts).append(text)
        else:
            raise ValueError(f"content with a part of the type {show(kind)}, which is no text")
    return texts, thoughts, refusals
