"""Rendering of chat templates with limits on time, memory and output.

A chat template is a program that is distributed with a model. The sandbox of jinja2 prevents access to files and to Python,
but not endless computation. Inference therefore renders each conversation, and training the first rows and their probes
(``probes.py``), in a process that the kernel ends at a limit. A template that loops only in a later row is not interrupted:
the run then hangs, as docs/scale/hangs.md describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_kto.data.tokens.bounded import BoundedProcess
from nemo_kto.data.tokens.message_content import in_form_of, rendered

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
