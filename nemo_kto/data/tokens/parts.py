"""Parts of a jsonl file: ranges of whole lines that are processed independently, in this process or in several."""

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
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TypeVar

from nemo_kto.data.rows.records import DataError
from nemo_kto.errors import UserError
from nemo_kto.utils.files import MAX_LINE_BYTES, open_file, other_format, read_lines

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_BYTES = 2**22  # minimum size of a part, which takes a few seconds to process
_MAX_PARTS = 1000  # approximate maximum per file; a large file has larger parts
_PARTS_FOR_A_PROCESS = 2  # minimum, because starting a process takes seconds
_MAX_DEFAULT = 16  # processes; each holds a tokenizer of some hundred MB
_SCAN_BYTES = 2**20
_FORMAT_BYTES = 64  # read to detect a file of another format
# Signals that may be sent to all processes of a job and that only the training process handles.
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Range of whole lines of a file."""

    number: int = 0  # index of the part, from 0
    start: int = 0  # first byte
    stop: int | None = None  # byte after the last one; None for the end of the file
    first_line: int = 1  # its number, from 1

    def lines(self, path: str | Path) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of each line, up to one above the length limit; DataError if the file cannot be opened."""
        place = self.start
        with _open(path) as file:
            file.seek(place)
            for line, raw in enumerate(read_lines(file), start=self.first_line):
                yield line, raw
                place += len(raw)
                if self.stop is not None and place >= self.stop:
                    return


WHOLE_FILE = FilePart()


def number_of_parts(path: Path) -> int:
    """Return the approximate number of parts that :func:`file_parts` yields; exact unless a line is as long as a part."""
    size = path.stat().st_size
    return max(1, -(-size // _part_bytes(size)))


def file_parts(path: Path) -> Iterator[FilePart]:
    """Yield the parts of a file while reading it once; they depend only on the file. DataError if it is of another format.

    A part that contains a line above the length limit is the last one.
    """
    number, start, line = 0, 0, 1
    with _open(path) as file:
        if (message := other_format(file.read(_FORMAT_BYTES))) is not None:
            raise DataError(f"{path}:1: must be JSON, one object per line, but the file is {message}")
        file.seek(0)
        size = os.fstat(file.fileno()).st_size
        part_bytes = _part_bytes(size)
        while True:
            lines, left, rest = 0, part_bytes, b"\n"
            while left and (chunk := file.read(min(_SCAN_BYTES, left))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
            if not left and chunk[-1:] != b"\n":
                rest = file.readline(MAX_LINE_BYTES)
                lines += rest.endswith(b"\n")
            stop = file.tell()
            if stop > start or number == 0:
                yield FilePart(number=number, start=start, stop=stop, first_line=line)
            if left or stop >= size or not rest.endswith(b"\n"):  # ``left``: the file has been shortened while it was read
                return
            number, start, line = number + 1, stop, line + lines


def _open(path: str | Path) -> BinaryIO:
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; correct the path, or give this user permission to read it"
        ) from error


def _part_bytes(size: int) -> int:
    return max(MIN_BYTES, size // _MAX_PARTS)


def size_groups(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield the items in order, in groups of about the minimum size of a part each."""
    group: list[Item] = []
    left = MIN_BYTES
    for item in items:
        group.append(item)
        left -= size(item)
        if left <= 0:
            yield group
            group, left = [], MIN_BYTES
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


_work: Callable[[Any], Any]  # set only in a worker process


def _begin(pickled: str) -> None:
    global _work
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already one process per core
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # written by the process that started this one, in a folder that only this user can open
    _work = pickle.loads(Path(pickled).read_bytes())  # nosec B301
    gc.freeze()  # exempt all imported objects from garbage collection


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _do(part: Any) -> Any:
    return _work(part)
