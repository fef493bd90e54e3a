"""Work on untrusted input in a new interpreter with limits on CPU time, memory and output."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from nemo_kto.data.tokens.parts import JOB_SIGNALS, end_with_parent, isolated_starts
from nemo_kto.errors import printable

_OUT_OF_MEMORY = 3  # exit status
_EXIT_SECONDS = 60  # to free the memory, on a busy machine
_MAX_ANSWER_BYTES = 2**27


class LimitError(Exception):
    """Work reached a limit; the text continues a sentence about what it must do."""


class WorkError(Exception):
    """Work raised an exception, whose message is the text."""


class BoundedProcess:
    """A new interpreter, which the kernel ends when work in it reaches a limit.

    Nothing in the same process can interrupt the computation of 9**9**9, or a regular expression. The interpreter is started
    by :meth:`start` or by the first call, and again after it has ended; it ends with this process.
    """

    def __init__(self, *, imports: tuple[str, ...], max_bytes: int) -> None:
        """Limit the memory to ``max_bytes`` in addition to that of the modules ``imports``, whose import has no limit."""
        self._imports, self._max_bytes = imports, max_bytes
        self._started: tuple[BaseProcess, Connection] | None = None

    def start(self) -> None:
        """Start the interpreter unless it runs; does not wait for its imports."""
        if self._started is not None:
            return
        context = multiprocessing.get_context("spawn")
        connection, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self._imports, self._max_bytes), daemon=True)
        with isolated_starts():
            process.start()
        util.Finalize(None, process.kill, exitpriority=0)  # before Python waits for it, because it ignores SIGTERM
        other.close()
        self._started = process, connection

    def close(self) -> int:
        """End the interpreter, also in the middle of work; return its exit code."""
        if self._started is None:
            return 0
        (process, connection), self._started = self._started, None
        connection.close()
        process.kill()
        process.join()
        return process.exitcode or 0

    def __call__(self, work: Callable[..., Any], *arguments: object, max_seconds: float) -> Any:
        """Return the result of ``work``, a function of a module, which must be a value of JSON.

        Raises LimitError if it needs more than ``max_seconds`` of CPU time or the memory, WorkError for its exceptions.
        """
        self.start()
        assert self._started is not None
        process, connection = self._started
        try:
            connection.send((work, arguments, max_seconds))
            answer = json.loads(connection.recv_bytes(_MAX_ANSWER_BYTES))
        except (EOFError, OSError):  # it has ended
            process.join(timeout=_EXIT_SECONDS)
            status = self.close()
            text = f", but ended its process with exit code {status}"
            if status == -signal.SIGPROF:
                text = f" within {max_seconds:g} seconds of CPU time, needed more"
            elif status == _OUT_OF_MEMORY:
                text = f" in {self._max_bytes >> 30} GiB of memory, needed more"
            raise LimitError(text) from None
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            raise WorkError(answer["error"])
        return answer["result"]


def _serve(connection: Connection, imports: tuple[str, ...], max_bytes: int) -> None:
    """Do the work that is sent, until the other end is closed."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()  # also during the imports
    for module in imports:
        importlib.import_module(module)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries write there when memory ends
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, even within a C function
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # rows may be private
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + max_bytes if most == resource.RLIM_INFINITY else min(used + max_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    while True:
        try:
            work, arguments, max_seconds = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        try:
            answer = json.dumps({"result": work(*arguments)}).encode()
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as error:  # untrusted input may cause any
            answer = json.dumps({"error": printable(str(error), 1000)}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)
