"""Rendering of chat templates with limits on time, memory and output.

A chat template is a program that is distributed with a model. The sandbox of jinja2 prevents access to files and to Python,
but not endless computation. Inference therefore renders each conversation in a process that the kernel ends at a limit.
Training renders the first rows and their probes (``probes.py``) there, before any row is rendered in this process. A template
that loops only in a later row is not interrupted: the run then hangs, as docs/scale/hangs.md describes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from nemo_kto.data.rows.records import LastRowError, RowError, TextOrMessages
from nemo_kto.data.tokens import bounded
from nemo_kto.data.tokens.bounded import BoundedProcess, LimitError
from nemo_kto.data.tokens.content import in_form_of
from nemo_kto.data.tokens.probes import find_plan, signature

MAX_SECONDS: float = 2  # of CPU time per row; a typical row takes a ten-thousandth of it
MAX_CHARACTERS = 10**7  # of a rendered row
_MAX_BYTES = 2**30  # of memory, in addition to the memory of the interpreter
REMEDY = "correct the template, or write the row as plain strings (with model.data.apply_chat_template=false)"
_process = partial(BoundedProcess, imports=(__name__, "transformers.utils.chat_template_utils"), max_bytes=_MAX_BYTES)
of_inference = _process()  # starts when it is needed, and ends with this process


class Conversation(NamedTuple):
    """Arguments for rendering a row: chat template, messages, and template variables (such as ``tools``)."""

    template: str
    prompt: TextOrMessages
    response: TextOrMessages
    variables: Mapping[str, object]


def try_template(rows: Sequence[Conversation], *, name: str) -> tuple[int, LastRowError] | None:
    """Render rows in a new interpreter, which takes as long as importing transformers.

    Returns index and error of the first row for which the template, called ``name`` in the error, exceeds a limit; None if
    there is none. Rows that the template refuses are skipped.
    """
    shapes = set[Hashable]()
    with contextlib.closing(_process()) as process:
        for number, row in enumerate(rows):
            shape = signature([*row.prompt, *row.response], row.variables, is_answered=bool(row.response))
            try:
                if process(_try_row, row, shape not in shapes, max_seconds=MAX_SECONDS):
                    shapes.add(shape)
            except LimitError as error:
                return number, limit_error(name, error)
    return None


def limit_error(name: str, error: LimitError) -> LastRowError:
    """Return the error about a template, called ``name``, that reached a limit."""
    return LastRowError(f"{name} must render a row{error}; {REMEDY}")


def out_of_memory(name: str) -> LastRowError:
    """Return the error about a template that needs too much memory."""
    return limit_error(name, LimitError(bounded.out_of_memory(_MAX_BYTES)))


def render_bounded(
    template: str, messages: Sequence[Any], variables: Mapping[str, Any], *, add_generation_prompt: bool
) -> str:
    """Return messages as a template writes them for inference; LimitError at a limit, WorkError if it refuses them."""
    turns, given = [*messages], {**variables}
    text = of_inference(_render, template, turns, given, add_generation_prompt, max_seconds=MAX_SECONDS)
    return str(text)


def parse_bounded(template: Any, text: str, *, prefix: str) -> dict[str, Any]:
    """Return the message that the response template of a tokenizer finds in a drawn text; raises as the above."""
    message: dict[str, Any] = of_inference(_parse, template, text, prefix, max_seconds=MAX_SECONDS)
    return message


def _render(template: str, messages: Sequence[Any], variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    # as apply_chat_template does
    turns = [{name: value for name, value in message.items() if value is not None} for message in messages]
    given = {"chat_template": template, **variables}
    (text,), _ = render_jinja_template([in_form_of(template, turns)], add_generation_prompt=add_generation_prompt, **given)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it must write at most {MAX_CHARACTERS:,} characters, got {len(text):,}")
    return str(text)


def _parse(template: Any, text: str, prefix: str) -> Any:
    from transformers.utils.chat_parsing import parse_response

    return parse_response(text, template, prefix=prefix)


def _try_row(row: Conversation, with_probe: bool) -> bool:
    """Render a row, and its probe if no row of its shape was rendered before; return whether the template accepts it."""

    def render(messages: Sequence[Any], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        try:
            return _render(row.template, messages, variables, add_generation_prompt)
        except MemoryError:
            raise
        except Exception as error:  # refused by the template: the rendering in the run names the reason
            raise RowError from error

    whole, is_answered = [*row.prompt, *row.response], bool(row.response)
    try:
        render(row.prompt, row.variables, add_generation_prompt=True)
        render(whole, row.variables, add_generation_prompt=False)
    except RowError:
        return False
    if with_probe:
        find_plan(render, whole, row.variables, is_answered=is_answered, template=row.template)
    return True
