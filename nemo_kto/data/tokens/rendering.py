"""Rendering of chat templates in a child process with limits on time, memory and output.

A chat template is a program that is distributed with a model. The sandbox of jinja2 prevents access to files and to Python,
but not the computation of 9**9**9, which nothing in the same process can interrupt. The rows of a batch are therefore
rendered in a fork, which the kernel terminates when it reaches a limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from nemo_kto.data.rows.records import LastRowError, RowError
from nemo_kto.data.tokens.parts import JOB_SIGNALS

Item = TypeVar("Item")
MAX_SECONDS: float = 2  # of CPU time per row; a typical row takes a ten-thousandth of it
MAX_CHARACTERS = 10**7
_MAX_BYTES = 2**30  # of memory, in addition to the memory used before
_LIMIT = "limit"  # result of a row that reached a limit
_REMEDY = "correct the template, or write the row as plain strings"


class RenderedText(NamedTuple):
    """Prompt and answer as rendered by the chat template."""

    prompt: str
    answer: str


def render_rows(
    render: Callable[[Item], RenderedText], rows: Sequence[Item], *, template: str
) -> list[RenderedText | RowError]:
    """Apply ``render`` to rows in a child process.

    Args:
        render: renders a row, or raises RowError if the row cannot be used. It can read the memory of this process but not
            change it.
        rows: arguments of ``render``.
        template: name of the chat template in error messages.

    Returns:
        One result for each row; a LastRowError for a row that reached a limit and for all rows after it.
    """
    results: list[RenderedText | RowError] = []
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        reader.close()
        _render_and_exit(render, rows, writer, template)
    writer.close()
    try:
        with contextlib.suppress(EOFError):  # the child ended before its last row
            while len(results) < len(rows):
                results.append(_result(*json.loads(reader.recv_bytes())))
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        reader.close()
        _, status = os.waitpid(child, 0)
    if missing := len(rows) - len(results):
        at_limit = results and isinstance(results[-1], LastRowError)
        results += [results[-1] if at_limit else LastRowError(_why_ended(status, template))] * missing
    return results


def _result(kind: str, *texts: str) -> RenderedText | RowError:
    if kind == "rendered":
        return RenderedText(*texts)
    return LastRowError(*texts) if kind == _LIMIT else RowError(*texts)


def _render_and_exit(
    render: Callable[[Item], RenderedText], rows: Sequence[Item], writer: Connection, template: str
) -> NoReturn:
    """Render the rows in the child process; never return to the parent's code or run its exit handlers."""
    try:
        _set_limits()
        for row in rows:
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # SIGPROF terminates the process, even within a C function
            answer = _answer(render, row, template)
            writer.send_bytes(json.dumps(answer).encode())
            if answer[0] == _LIMIT:
                break
        os._exit(0)
    except BrokenPipeError:  # the parent has ended
        os._exit(1)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _answer(render: Callable[[Item], RenderedText], row: Item, template: str) -> tuple[str, ...]:
    try:
        rendered = render(row)
    except MemoryError:
        return _LIMIT, f"{template} must render a row in {_MAX_BYTES >> 30} GiB of memory, needed more; {_REMEDY}"
    except RowError as error:
        return "error", str(error)
    if (length := sum(map(len, rendered))) > MAX_CHARACTERS:
        message = f"{template} must render a row as at most {MAX_CHARACTERS:,} characters, got {length:,}"
        return _LIMIT, f"{message}; {_REMEDY}"
    return "rendered", *rendered


def _set_limits() -> None:
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    faulthandler.disable()
    gc.disable()  # garbage collection would copy the parent's memory pages
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # rows may be private
    before = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = before + _MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _why_ended(status: int, template: str) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"{template} must render a row within {MAX_SECONDS} seconds of CPU time, needed more; {_REMEDY}"
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
    return f"{template} must render a row, but ended its process with {how}; {_REMEDY}"
