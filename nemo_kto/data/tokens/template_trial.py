"""Trial of a chat template on the first rows, in a new interpreter with limits on time and memory.

A chat template is a program that is distributed with a model. The sandbox of jinja2 prevents access to files and to Python,
but not the computation of 9**9**9, which nothing in the same process can interrupt. The first rows and their probes
(``probes.py``) are therefore rendered in a process that the kernel ends at a limit, before any row is rendered in this
process. A template that loops only in a later row is not interrupted: the run then hangs, as docs/scale/hangs.md describes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nemo_kto.data.rows.records import LastRowError, RowError, TextOrMessages
from nemo_kto.data.tokens.content import in_form_of
from nemo_kto.data.tokens.parts import JOB_SIGNALS, isolated_starts
from nemo_kto.data.tokens.probes import find_plan, signature

MAX_SECONDS: float = 2  # of CPU time per row; a typical row takes a ten-thousandth of it
_MAX_BYTES = 2**30  # of memory, in addition to the memory of the interpreter
_OUT_OF_MEMORY = 3  # exit status
REMEDY = "correct the template, or write the row as plain strings (with model.data.apply_chat_template=false)"


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
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(rows, MAX_SECONDS, writer))
    with isolated_starts():
        process.start()
    writer.close()
    rendered = 0
    try:
        with contextlib.suppress(EOFError):  # the process has ended
            while reader.recv_bytes():
                rendered += 1
        process.join()
    finally:
        process.kill()
        process.join()
        reader.close()
    if (status := process.exitcode) == 0:
        return None
    if status == -signal.SIGPROF:
        error = f"{name} must render a row within {MAX_SECONDS} seconds of CPU time, needed more; {REMEDY}"
    elif status == _OUT_OF_MEMORY:
        error = out_of_memory(name)
    else:
        error = f"{name} must render a row, but ended its process with exit code {status}; {REMEDY}"
    return rendered, LastRowError(error)


def out_of_memory(name: str) -> str:
    """Return the error message about a template that needs too much memory."""
    return f"{name} must render a row in {_MAX_BYTES >> 30} GiB of memory, needed more; {REMEDY}"


def _render(rows: Sequence[Conversation], max_seconds: float, writer: Connection) -> None:
    """Render the rows in the new interpreter, and send one byte for each."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, even within a C function
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # rows may be private
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + _MAX_BYTES if most == resource.RLIM_INFINITY else min(used + _MAX_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))

    def render(template: str, messages: Sequence[Any], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        turns, given = [in_form_of(template, messages)], {"chat_template": template, **variables}
        try:
            (text,), _ = render_jinja_template(turns, add_generation_prompt=add_generation_prompt, **given)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as error:  # refused by the template: the rendering in the run names the reason
            raise RowError from error
        return str(text)

    shapes = set()
    for row in rows:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        whole, is_answered, of_template = [*row.prompt, *row.response], bool(row.response), partial(render, row.template)
        with contextlib.suppress(RowError):
            of_template([*row.prompt], row.variables, add_generation_prompt=True)
            of_template(whole, row.variables, add_generation_prompt=False)
            if (shape := signature(whole, row.variables, is_answered=is_answered)) not in shapes:
                shapes.add(shape)
                find_plan(of_template, whole, row.variables, is_answered=is_answered, template=row.template)
        writer.send_bytes(b".")
    signal.setitimer(signal.ITIMER_PROF, 0)
