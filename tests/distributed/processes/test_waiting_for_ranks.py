"""Ranks wait for a working rank longer than the timeout of a collective, and not for one that is gone."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import _set_pg_timeout

from nemo_kto.processes import ranks, rendezvous
from tests.helpers.messages import Message

TIMEOUT, WORK = 1.0, 1.5  # seconds that a collective waits; that the work takes
FOLDER = Path()  # of the results, in the process of a rank


def _rank(number: int, store: dict[str, str], job: str, results: str) -> None:
    """One of two ranks in its own process; writes the result of a job to a file. ``store``: variables of the rendezvous."""
    from nemo_kto.device.patches import install_cpu_backend
    from nemo_kto.processes import watchdog

    install_cpu_backend()
    watchdog.TICK_SECONDS = 0.1
    watchdog.SILENT_SECONDS = 1.0 if job == "killed" else 60.0  # a busy machine may silence a rank that lives
    global FOLDER
    FOLDER = Path(results)
    os.environ |= {**store, "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number)}
    rendezvous.join("gloo", timeout=timedelta(minutes=2))  # they may start at different times
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=TIMEOUT))
    assert watchdog._current is not None
    watchdog._current.timeout = 10 * TIMEOUT if job == "long work" else TIMEOUT
    try:
        message = JOBS[job]()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    Path(results, str(number)).write_text(message)
    os._exit(0)


def _long_work() -> str:
    """Work that takes longer than the timeout, and a collective after it."""
    from nemo_kto.distributed import state

    answer = state.from_rank_zero(lambda: time.sleep(WORK) or f"from rank {state.rank()}", doing="thinking")
    order = [state.rank()]
    with state.on_all_ranks(doing="loading"):
        time.sleep(WORK * (state.rank() == 1))
    gathered: list[int] = [0, 0]
    dist.all_gather_object(gathered, *order)
    return f"{answer}, {gathered}"


def _killed() -> str:
    """Rank 0 is killed while it works."""
    from nemo_kto.distributed import state

    return state.from_rank_zero(lambda: os.kill(os.getpid(), signal.SIGKILL) or "never", doing="hashing the weights")


def _failing_rank() -> str:
    from nemo_kto.distributed import state

    with state.on_all_ranks(doing="loading"):
        if state.rank() == 0:
            raise ValueError("broken")
        deadline = time.monotonic() + 50
        while not (FOLDER / "0").exists():  # rank 0 has ended, although this one still loads
            if time.monotonic() > deadline:
                return "rank 0 waited"
            time.sleep(0.01)
    return "loaded"


JOBS: dict[str, Callable[[], str]] = {"long work": _long_work, "killed": _killed, "failing": _failing_rank}


TwoRanks = Callable[..., list[tuple[str, int]]]  # of each rank: the result of its job, and its process


@pytest.fixture
def two_ranks(tmp_path: Path) -> TwoRanks:
    """``two_ranks(job, tcp=False)``: they meet in a file, or over TCP at rank 0."""

    def run(job: str, *, tcp: bool = False) -> list[tuple[str, int]]:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.preload"])
        store = {ranks.STORE_FILE: str(tmp_path / "store")}
        if tcp:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        processes = [context.Process(target=_rank, args=(number, store, job, str(tmp_path))) for number in range(2)]
        for process in processes:
            process.start()
        processes[1].join(60)
        found = []
        for number, process in enumerate(processes):
            if number == 0 and job != "killed":
                process.join(60)
            process.kill()
            process.join()
            file = tmp_path / str(number)
            found.append((file.read_text() if file.is_file() else "nothing", process.pid or 0))
        return found

    return run


def test_ranks_wait_longer_than_the_timeout_of_a_collective_for_a_working_rank(two_ranks: TwoRanks) -> None:
    assert [message for message, _ in two_ranks("long work")] == ["from rank 0, [0, 1]"] * 2


@pytest.mark.parametrize("tcp", [False, True], ids=["store of the launcher", "store of rank 0"])
def test_a_killed_rank_is_named(tcp: bool, two_ranks: TwoRanks) -> None:
    (nothing, pid), (message, _) = two_ranks("killed", tcp=tcp)
    assert nothing == "nothing"
    names = ["hashing the weights", "rank 1 of 2", "ended", "store"] if tcp else [f"{pid}", os.uname().nodename, "1 s"]
    assert message == Message("RuntimeError", "rank 0", *names)


def test_a_rank_that_fails_does_not_wait_for_the_others(two_ranks: TwoRanks) -> None:
    (failure, _), (message, _) = two_ranks("failing")
    assert failure == "ValueError: broken"
    assert message == "loaded"
