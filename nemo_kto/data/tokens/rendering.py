"""Messages as chat templates read and write them, and probes of a template: which parts of a row it writes, and where."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from nemo_kto.data.rows.records import DEFAULT_DROPS, LOST_TEXT, LostTextError, RowError
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


_SWITCHES = ("enable_thinking", "thinking")  # variables that select prompts with thoughts
_NOT_CHECKED = f"{MARK}t"  # thoughts of earlier answers, which templates leave out as servers do
_OLD_CALL = "function_call"  # of a message, before OpenAI introduced tool_calls
_OPENING = 16  # characters that tell the beginning of an answer from the end of one
DROP_REMEDY = f"leave such rows out with model.data.drop=[{','.join((*DEFAULT_DROPS, LOST_TEXT))}]"


class Plan(NamedTuple):
    """How rows of a shape are rendered, so that nothing is lost and the answer continues the prompt of inference."""

    form: str = GIVEN  # of the thoughts of the answer, see ``content.in_form``
    variables: Mapping[str, Any] = {}  # in addition to those of the row
    end: str = ""  # token after the answer that begins the next turn, if the template writes no other


class _Part(NamedTuple):
    mark: str
    name: str
    message: int  # its index; -1 for tools


class _Probe(NamedTuple):
    """A row with marks in place of its texts."""

    messages: list[Mapping[str, Any]]  # the last of them is the answer, if the row has one
    tools: list[Mapping[str, Any]]
    parts: list[_Part]


def signature(messages: Messages, variables: Mapping[str, Any], *, is_answered: bool) -> Hashable:
    """Return what the rendering of a row depends on, apart from its texts: variables, roles and keys, and their order."""
    shapes = [*map(_shape, messages)]
    others = {name: value for name, value in variables.items() if name != "tools"}
    tools = frozenset((frozenset(tool), frozenset(_function(tool))) for tool in variables.get("tools") or ())
    ends = shapes[0], shapes[-1] if is_answered else None
    return json.dumps(others, sort_keys=True, default=str) if others else "", tools, frozenset(pairwise(shapes)), ends


def _shape(message: Mapping[str, Any]) -> Hashable:
    content = message.get("content")
    kind = (content.strip() and (END_OF_THOUGHTS in content) + 1) if isinstance(content, str) else type(content)
    of_calls = tuple((frozenset(call), bool(_function(call).get("arguments"))) for call in _calls(message))
    return message["role"], kind, of_calls, frozenset((name, bool(value)) for name, value in message.items())


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return function if isinstance(function, dict) else {}


def _probe(messages: Messages, variables: Mapping[str, Any], *, is_answered: bool) -> _Probe:
    parts: list[_Part] = []

    def mark(name: str, message: int) -> str:
        parts.append(_Part(f"{MARK}x{len(parts)}x", name, message))
        return parts[-1].mark

    def call(given: Any, name: str, message: int) -> Any:
        function = {**_function(given)}
        if function.get("name"):
            function["name"] = mark(name, message)
        if message >= 0 and isinstance(function.get("arguments"), dict) and function["arguments"]:
            function["arguments"] = {mark(name, message): mark(name, message)}
        return {**given, "function": function} if "function" in given else function

    marked: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        is_answer = is_answered and index == len(messages) - 1
        whose = "the answer" if is_answer else f'messages of the role "{message["role"]}"'
        new, content = {**message}, message.get("content")
        if isinstance(content, str) and content.strip():
            head, text = "", content
            if END_OF_THOUGHTS in content and message["role"] == "assistant":
                thoughts, _, text = content.partition(END_OF_THOUGHTS)
                begin = f"{BEGIN_OF_THOUGHTS}\n" if BEGIN_OF_THOUGHTS in thoughts else ""
                marks = mark(f"the thoughts of {whose}", index) if is_answer else _NOT_CHECKED
                head = f"{begin}{marks}\n{END_OF_THOUGHTS}\n\n"
            new["content"] = head + (mark(f"the content of {whose}", index) if text.strip() else "")
        if (field := field_of_thoughts(message)) is not None:
            new[field] = mark(f'"{field}" of {whose}', index) if is_answer else _NOT_CHECKED
        if calls := _calls(message):
            new["tool_calls"] = [call(each, f'"tool_calls" of {whose}', index) for each in calls]
        if isinstance(message.get(_OLD_CALL), dict):
            new[_OLD_CALL] = call(message[_OLD_CALL], f'"{_OLD_CALL}" of {whose}', index)
        marked.append(new)
    return _Probe(marked, [call(tool, '"tools"', -1) for tool in variables.get("tools") or ()], parts)


def find_plan(
    render: Render,
    messages: Messages,
    variables: Mapping[str, Any],
    *,
    is_answered: bool,
    template: str,
    special: tuple[str, ...] = (),
    stops: Sequence[str] = (),
) -> Plan | LostTextError | None:
    """Return how rows of the shape of this one are rendered, or the error of all of them; None if the template refuses it.

    If the shape has no continuation of the prompt, rendering a row by the plan gives the error. ``special`` are the tokens
    that may end an answer in a template, ``stops`` those that a model may write to end it.
    """
    probe, faults = _probe(messages, variables, is_answered=is_answered), list[LostTextError | None]()
    if probe.tools:
        variables = {**variables, "tools": probe.tools}
    prompt, answer = (probe.messages[:-1], probe.messages[-1]) if is_answered else (probe.messages, None)
    prompts = _prompts(render, prompt, variables, template=template, thoughts=answer is not None and has_thoughts(answer))
    if answer is None:
        return next((_Reading(render, probe, variables).lost(shown) or Plan() for shown in prompts), None)
    has_switch = len(prompts) > 1 or any(name in variables and name in template for name in _SWITCHES)
    is_read = False
    for shown, more in prompts.items():
        reading = _Reading(render, probe, {**variables, **more})
        for form in _forms(template, shown, answer, has_switch=has_switch):
            try:
                text = continue_prompt(render, prompt, in_form(answer, form), reading.variables, shown=shown)[1]
                is_read = True
            except RowError:
                text = None
            fault = None if text is None else reading.lost(shown + text) or reading.misplaced(shown, text)
            if fault is None and text is not None:
                ended = text.rstrip().endswith(special)
                return Plan(form, more, "" if ended else reading.next_turn(in_form(answer, form), text, stops))
            faults.append(fault)
    return next(iter(faults), None) or (Plan() if is_read else None)


def _prompts(
    render: Render, prompt: Messages, variables: Mapping[str, Any], *, template: str, thoughts: bool
) -> dict[str, Mapping[str, Any]]:
    """Return the prompt of inference, and that of an answer with or without thoughts, with the variables that they need."""
    prompts: dict[str, Mapping[str, Any]] = {}
    for more in ({}, *({name: thoughts} for name in _SWITCHES if name in template and name not in variables)):
        with contextlib.suppress(RowError):
            prompts.setdefault(render(prompt, {**variables, **more}, add_generation_prompt=True), more)
    return prompts


def _forms(template: str, shown: str, answer: Mapping[str, Any], *, has_switch: bool) -> Iterator[str]:
    """Yield forms of the answer after the prompt ``shown``, the preferred one first."""
    begun = begins_thoughts(shown)
    if has_thoughts(answer):
        if begun and field_of_thoughts(answer) is None:
            yield WITH_BEGINNING
        yield from (GIVEN, *FIELDS)
        if begun or END_OF_THOUGHTS in template:
            yield from (CONTINUED, WITH_BEGINNING) if begun else (WITH_BEGINNING,)
    else:
        yield GIVEN
        if begun and not has_switch:  # the model closes thoughts that it does not have
            yield from (FIELDS[0], CONTINUED, WITH_BEGINNING)


class _Reading(NamedTuple):
    """Rendering of a probe by a template."""

    render: Render
    probe: _Probe
    variables: Mapping[str, Any]

    def written(self, *messages: Mapping[str, Any]) -> str:
        """Return messages as the template writes them; empty if it refuses them."""
        try:
            return self.render(messages, self.variables, add_generation_prompt=False)
        except RowError:
            return ""

    def lost(self, text: str) -> LostTextError | None:
        """Return an error about the parts that are not in the text that is trained."""
        lost = [part for part in self.probe.parts if part.mark not in text.lower() and not self._is_removed_later(part)]
        if not lost:
            return None
        names = " and ".join(dict.fromkeys(part.name for part in lost))
        remedy = "remove that, write it where the template reads it, or use another template"
        return LostTextError(f"the tokenizer's chat template leaves out {names}; {remedy}; or {DROP_REMEDY}")

    def _is_removed_later(self, part: _Part) -> bool:
        """Return whether a part of an earlier answer is written as long as this is the last message.

        Templates leave such parts out on purpose, also on servers: gpt-oss takes the text beside a call for thoughts.
        """
        upto = self.probe.messages[: part.message + 1]
        is_earlier = 0 < len(upto) < len(self.probe.messages) and upto[-1]["role"] == "assistant"
        return is_earlier and part.mark in self.written(*upto).lower()

    def misplaced(self, prompt: str, answer: str) -> LostTextError | None:
        """Return an error about an answer that leaves thoughts open, begins them again, or has another turn."""
        begins, ends = answer.count(BEGIN_OF_THOUGHTS), answer.count(END_OF_THOUGHTS)
        plain = self.written(*self.probe.messages[:-1], {"role": "assistant", "content": MARK})
        end = plain.rpartition(MARK)[2].strip()
        if begins_thoughts(prompt):
            is_right = (begins, ends) == (0, 1)
        else:
            is_right = begins <= 1 and not (begins + ends and prompt.rstrip().endswith(END_OF_THOUGHTS))
        opened = prompt.removeprefix(self.written(*self.probe.messages[:-1])).strip().removesuffix(BEGIN_OF_THOUGHTS).strip()
        is_again = bool(end and opened) and opened in answer and end in answer.rstrip().removesuffix(end)
        is_next = answer.rstrip().endswith(prompt.rstrip()[-_OPENING:])  # the template begins it without being asked to
        if is_right and not (is_again or is_next):
            return None
        before, after = (re.sub(f"{MARK}\\w*", "...", text) for text in (prompt, answer))
        got = f"{after!r} after {before[-40:]!r}"
        wanted = "must continue the prompt as the model does, with thoughts once and one end of the turn"
        return LostTextError(f"the tokenizer's chat template {wanted}, got {got}; use another template, or {DROP_REMEDY}")

    def next_turn(self, answer: Mapping[str, Any], text: str, stops: Sequence[str]) -> str:
        """Return the first of ``stops`` if it begins the turn after the answer, which ends by no token itself (GLM 4.5)."""
        marks = [part.mark for part in self.probe.parts if part.mark in text]
        if not marks:
            return ""
        calls = _calls(answer)
        of_tool = {"role": "tool", "tool_call_id": calls[-1].get("id")} if calls else {"role": "user"}
        last = max(marks, key=text.rindex)
        tail = text.rpartition(last)[2].rstrip()
        following = self.written(*self.probe.messages[:-1], answer, {**of_tool, "content": "!"}).rpartition(last)[2]
        after = following.removeprefix(tail)
        token = next((token for token in stops if after.lstrip().startswith(token)), "")
        return after[: after.index(token)] + token if token and following.startswith(tail) else ""
