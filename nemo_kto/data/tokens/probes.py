"""What a chat template reads: the shape of a row is rendered with a mark in each of its texts, once for all such rows."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from nemo_kto.data.rows.records import DEFAULT_DROPS, LOST_TEXT, LostTextError, RowError
from nemo_kto.data.tokens.rendering import (
    BEGIN_OF_THOUGHTS,
    CONTINUED,
    END_OF_THOUGHTS,
    FIELDS,
    GIVEN,
    MARK,
    WITH_BEGINNING,
    Messages,
    Render,
    begins_thoughts,
    continue_prompt,
    field_of_thoughts,
    has_thoughts,
    in_form,
)

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
