"""Functions for worker processes that tokenise parts of a file; the module imports little."""

from __future__ import annotations

import os
import signal
import time

from nemo_kto.data.rows.row_files import FilePart


def process_and_number(part: FilePart) -> tuple[int, int]:
    time.sleep(0.05)
    return os.getpid(), part.number


def killed_at_two(part: FilePart) -> int:
    if part.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return part.number


def without_end(part: FilePart) -> None:
    print(os.getpid(), flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # as a batch system sends them to the whole job
        os.kill(os.getpid(), number)
    time.sleep(600)
