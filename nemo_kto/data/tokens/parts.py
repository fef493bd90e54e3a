"""A jsonl file in parts: ranges of whole lines that are read each by itself, in this process or in several."""

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

MIN_BYTES = 2**22  # of a part: a few seconds of work
_MAX_PARTS = 1000  # of a file, roughly: those of a large one are larger
_PARTS_FOR_A_PROCESS = 2  # as it takes seconds to start
_MAX_DEFAULT = 16  # processes; each holds a tokenizer, some hundred MB
_SCAN_BYTES = 2**20
_FORMAT_BYTES = 64  # which show a file of another format
# What may be sent to a whole job at once and is for the process that trains to act on.
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Whole lines of a file.

    Attributes:
        number: of the part, from 0.
        start, stop: its bytes; ``stop`` is None at the end of the file.
        first_line: the number of its first line, from 1.
    """

    number: int = 0
    start: int = 0
    stop: int | None = None
    first_line: int = 1

    def lines(self, path: str | Path) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each line; one is in memory at a time. One that is too long is the last (``read_lines``).

        Raises:
            DataError: the file cannot be opened.
        """
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
    """About how many parts :func:`file_parts` gives: exactly, but for lines as long as parts."""
    size = path.stat().st_size
    return max(1, -(-size // _part_bytes(size)))


def file_parts(path: Path) -> Iterator[FilePart]:
    """The parts of a file, found while it is read once; they depend on the file and on nothing else.

    The part in which a line is found to be too long is the last one.

    Raises:
        DataError: the file cannot be opened, or is of another format.
    """
    number, start, line = 0, 0, 1
    with _open(path) as file:
        if (told := other_format(file.read(_FORMAT_BYTES))) is not None:
            raise DataError(f"{path}:1: must be JSON, one object per line, but the file is {told}")
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
            if left or stop >= size or not rest.endswith(b"\n"):  # the first: the file has become shorter meanwhile
                return
            number, start, line = number + 1, stop, line + lines


def _open(path: str | Path) -> BinaryIO:
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; correct the path, or let this user read it") from error


def _part_bytes(size: int) -> int:
    return max(MIN_BYTES, size // _MAX_PARTS)


def size_groups(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items in their order, in groups that each have about the size of a part."""
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
    """How many processes to read parts in; ``wanted``: at most so many; None: one for each core of this process."""
    cores = min(len(os.sched_getaffinity(0)), _MAX_DEFAULT)
    return max(1, min(wanted or cores, parts // _PARTS_FOR_A_PROCESS))


def map_parts(
    work: Callable[[Item], Result], parts: Iterable[Item], *, processes: int, doing: str, setting: str
) -> Iterator[Result]:
    """What the work gives for each part (of a file, or a group of files), in the order of the parts.

    Other processes are new interpreters: a fork of this one could inherit a lock that a thread of gloo or of the tokenizer
    holds, and nobody would free it. They end with this process, however that ends.

    Args:
        work: is pickled, and sent once to each process.
        processes: 1: the work is done here.
        doing: what is done, as in "tokenising rows.jsonl", for the error.
        setting: where the user says how many processes there are.

    Raises:
        UserError: a process was killed.
    """
    if processes == 1:
        yield from map(work, parts)
        return
    with tempfile.TemporaryDirectory(prefix="nemo_kto_parts_") as scratch:  # only this user can open it
        # Through a file, as each process would hold up the start of the next one while it reads much from a pipe.
        pickled = Path(scratch, "work")
        pickled.write_bytes(pickle.dumps(work))
        yield from _in_processes(pickled, parts, processes, doing, setting)


def _in_processes(pickled: Path, parts: Iterable[Any], processes: int, doing: str, setting: str) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    with _isolated_starts():  # the pool starts Python's resource tracker
        pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(str(pickled),))
    pending: deque[Future[Any]] = deque()
    try:
        for part in parts:
            with _isolated_starts():
                pending.append(pool.submit(_do, part))
            if len(pending) > 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.kill()
        if isinstance(error, BrokenProcessPool):
            told = f"a process was killed while {processes} were {doing} (out of memory?)"
            raise UserError(f"{told}; set {setting} below {processes}") from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _isolated_starts() -> Iterator[None]:
    """Processes that are started in the block import neither the program that runs here nor files of the working directory.

    The program may lack the guard for being imported, and the directory may be that of a model that somebody else made. The
    environment is restored, since programs that a user's callback starts may need the modules beside them.
    """
    name = "PYTHONSAFEPATH"  # python -P
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


_work: Callable[[Any], Any]  # in a process of its own


def _begin(pickled: str) -> None:
    global _work
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores have a process each
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # written by the process that started this one, in a folder that only this user can open
    _work = pickle.loads(Path(pickled).read_bytes())  # nosec B301
    gc.freeze()  # so that no collection goes through all that was imported


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _do(part: Any) -> Any:
    return _work(part)
