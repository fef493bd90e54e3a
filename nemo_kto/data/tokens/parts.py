"""Work on parts of data files, in this process or in several."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle  # nosec B403
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
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from nemo_kto.data.rows import row_files as files
from nemo_kto.errors import UserError

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
