"""Processes that work on parts of data files, or on untrusted input with limits on CPU time, memory and output."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import pickle  # nosec B403
import resource
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from nemo_kto.data.rows import row_files as files
from nemo_kto.errors import UserError, printable

Item = TypeVar("Item")
Result = TypeVar("Result")

_PARTS_FOR_A_PROCESS = 2  # minimum, because starting a process takes seconds
_MAX_DEFAULT = 16  # processes; each holds a tokenizer of some hundred MB
# Signals that may be sent to all processes of a job and that only the training process handles.
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def size_groups(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield the items in order, in groups of about the minimum size of a part each."""
    group: list[Item] = []
    left = files.MIN_BYTES
    for item in items:
        group.append(item)
        left -= size(item)
        if left <= 0:
            yield group
            group, left = [], files.MIN_BYTES
    if group:
        yield group


def number_of_processes(wanted: int | None, parts: int) -> int:
    """Return the number of processes for ``parts`` parts: at most ``wanted``, or one per core (at most 16) if None."""
    cores = min(len(os.sched_getaffinity(0)), _MAX_DEFAULT)
    return max(1, min(wanted or cores, parts // _PARTS_FOR_A_PROCESS))


def map_parts(
    work: Callable[[Item], Result], parts: Iterable[Item], *, processes: int, doing: str, setting: str
) -> Iterator[Result]:
    """Yield the result of ``work`` for each part (of a file, or group of files), in the order of the parts.

    With one process, the work is done in this one. Worker processes are new interpreters, because a fork of this process
    could inherit a lock that a thread of gloo or of the tokenizer holds and that would never be released. ``work`` is
    pickled and sent once to each; they end together with this process, however it ends.

    Raises UserError, which names ``doing`` (such as "tokenising rows.jsonl") and ``setting``, if a process was killed.
    """
    if processes == 1:
        yield from map(work, parts)
        return
    with tempfile.TemporaryDirectory(prefix="nemo_kto_parts_") as scratch:  # accessible only to this user
        # Sent through a file, because reading a large object from a pipe would delay the start of the next process.
        pickled = Path(scratch, "work")
        pickled.write_bytes(pickle.dumps(work))
        context = multiprocessing.get_context("spawn")
        with isolated_starts():  # the pool starts Python's resource tracker
            pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(str(pickled),))
        pending: deque[Future[Any]] = deque()
        try:
            for part in parts:
                with isolated_starts():
                    pending.append(pool.submit(_do, part))
                if len(pending) > 2 * processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException as error:
            for process in list((pool._processes or {}).values()):
                process.kill()
            if isinstance(error, BrokenProcessPool):
                message = f"a process was killed while {processes} were {doing} (out of memory?)"
                raise UserError(f"{message}; set {setting} below {processes}") from error
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def isolated_starts() -> Iterator[None]:
    """Start processes in the block that import neither the running program nor files of the working directory.

    The program may have no ``if __name__ == "__main__"`` guard, and the working directory may be that of a model.
    """
    _end_tracker_at_exit()
    name = "PYTHONSAFEPATH"  # has the effect of python -P
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    before, os.environ[name] = os.environ.get(name), "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@cache
def _end_tracker_at_exit() -> None:
    """Make the exit of this process wait for Python's resource tracker, which would otherwise end after the command."""
    # after all other finalizers, which still use it
    util.Finalize(None, resource_tracker._resource_tracker._stop, exitpriority=-1000)  # type: ignore[attr-defined]


_work: Callable[[Any], Any]  # set only in a worker process


def _begin(pickled: str) -> None:
    global _work
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already one process per core
    threading.Thread(target=end_with_parent, daemon=True).start()
    # written by the process that started this one, in a folder that only this user can open
    _work = pickle.loads(Path(pickled).read_bytes())  # nosec B301
    gc.freeze()  # exempt all imported objects from garbage collection


def end_with_parent() -> None:
    """End this process when the one that started it ends, however it does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _do(part: Any) -> Any:
    return _work(part)


_OUT_OF_MEMORY = 3  # exit status
_EXIT_SECONDS = 60  # to free the memory, on a busy machine
_MAX_ANSWER_BYTES = 2**27
_START_METHOD = "spawn"  # tests use a forkserver that has imported the modules


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
        context: Any = multiprocessing.get_context(_START_METHOD)
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
    gc.disable()  # imported objects are never freed, and looking for garbage among them takes a quarter of the time
    for module in imports:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
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
