"""Gloo ranks for tests: workers, forked from a process that has imported torch and megatron-core, that run many small jobs.

    ranks.run(world_size, function, *arguments) -> [result of rank 0, result of rank 1, ...]

``function`` must be importable (module level); it runs between ``init_process_group`` and its end on every rank.
"""

from __future__ import annotations

import gc
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 500
PRELOADED = ["tests.distributed.preload"]  # found from the repository's root
# What gloo says where ranks have not met: several pools on a machine take ports and give them back all the time, and now and
# then a rank connects to one that has just changed hands. Nothing of the job has happened then, and it is begun again.
NOT_CONNECTED, ATTEMPTS = "Gloo connectFullMesh failed", 3
# Some jobs, those with experts most of all, leave process groups behind that Python cannot see. The thread of each wakes a
# hundred times a second: a thousand of them took half of the processors' time. A worker that has more is replaced by a fork.
MAX_THREADS = 100


@cache
def ensure_forkserver() -> None:
    """Start the process that ranks and bounded processes are forked from, unless it runs."""
    forkserver.set_forkserver_preload(PRELOADED)
    before = os.getcwd()
    os.chdir(REPOSITORY)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)


def _worker(number: int, inbox: Any, outbox: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from nemo_kto.device.patches import install_cpu_backend
    from nemo_kto.distributed import state

    install_cpu_backend()
    while (job := inbox.get()) is not None:
        function, arguments, store, world_size = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=number,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_SECONDS),
            )
            os.environ["LOCAL_RANK"] = str(number)
            result = function(*arguments)
            state.destroy()  # the parent removes the store's folder as soon as all ranks have answered
            outbox.put((number, True, result))
        except BaseException:
            outbox.put((number, False, traceback.format_exc()))
        finally:
            state.destroy()
            gc.collect()
            gc.freeze()  # as in preload.py; modules imported by a job stay, its tensors are freed


class RankPool:
    """Keeps up to ``max_ranks`` processes; a failed job ends them all, and the next one starts fresh."""

    def __init__(self, *, max_ranks: int = 4) -> None:
        self._context = mp.get_context("forkserver")
        ensure_forkserver()
        self._max_ranks = max_ranks
        self._workers: list[tuple[Any, Any]] = []
        self._outbox: Any = self._context.Queue()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(*arguments)`` on ``world_size`` ranks.

        Returns:
            The results in rank order.

        Raises:
            RuntimeError: a rank failed; carries its traceback.
        """
        if world_size > self._max_ranks:
            raise ValueError(f"world_size must be at most {self._max_ranks}, got {world_size}")
        for _ in range(ATTEMPTS - 1):
            try:
                return self._run(world_size, function, *arguments)
            except RuntimeError as error:
                if NOT_CONNECTED not in str(error):
                    raise
        return self._run(world_size, function, *arguments)

    def _run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if any(not process.is_alive() or _threads(process.pid) > MAX_THREADS for process, _ in self._workers):
            self.close()
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as folder:
            for _, inbox in self._workers[:world_size]:
                inbox.put((function, arguments, f"{folder}/store", world_size))
            results: dict[int, Any] = {}
            deadline = time.monotonic() + TIMEOUT_SECONDS + 30
            while len(results) < world_size:
                codes = [process.exitcode for process, _ in self._workers[:world_size]]
                try:
                    number, good, value = self._outbox.get(timeout=5)
                except queue.Empty:
                    if time.monotonic() < deadline and codes == [None] * world_size:
                        continue
                    self.close()
                    raise RuntimeError(
                        f"only ranks {sorted(results)} of {world_size} answered, exit codes {codes}"
                    ) from None
                if not good:
                    self.close()
                    raise RuntimeError(f"rank {number} failed:\n{value}")
                results[number] = value
        return [results[number] for number in range(world_size)]

    def _grow(self, world_size: int) -> None:
        while len(self._workers) < world_size:
            inbox = self._context.Queue()
            process = self._context.Process(target=_worker, args=(len(self._workers), inbox, self._outbox))
            process.start()
            self._workers.append((process, inbox))

    def close(self) -> None:
        """End every worker; hanging ones are killed."""
        for _, inbox in self._workers:
            inbox.put(None)
        for process, _ in self._workers:
            process.join(timeout=2)
            process.kill()
            process.join()
        self._workers = []
        self._outbox = self._context.Queue()


def _threads(process: int) -> int:
    """Number of threads of a process; 0 if unknown."""
    tasks = Path(f"/proc/{process}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0
