"""A stuck, stopped or killed rank is named by the others within the timeout; ranks wait longer for one that works."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import _set_pg_timeout

from nemo_kto.processes import ranks, rendezvous
from tests.helpers import fork_server
from tests.helpers.commands import CLI, GOOD, TRAINING, environment, run, stub_training
from tests.helpers.messages import Message, assert_names

NAME = socket.gethostname()
# Timeout of the collectives in seconds; a rank that waits for three quarters of it sends a request to the others.
TIMEOUT = 6

# The command's code around a training, and a training of steps with one collective each.
PROGRAM = f"""
import datetime, os, sys, time, torch, torch.distributed as dist
from nemo_kto.processes import ranks, watchdog; from nemo_kto.distributed import state

rank, done = int(os.environ["RANK"]), 0
ranks.PRINT_SECONDS = 1

def steps(number, trouble):
    global done
    state.init_distributed(layout=state.Layout(), seed=0, timeout=datetime.timedelta(seconds={TIMEOUT}))
    watchdog.count_steps(lambda: done)
    for done in range(number):
        with watchdog.phase("data"):
            if rank == 1 and done == 2:
                trouble()
        with watchdog.phase("forward_backward"):
            total = torch.ones(1)
            dist.all_reduce(total)
        open(f"step{{done}}-{{rank}}", "w").close()
    state.destroy()

def sleep_for_ever():
    time.sleep(1000)

try:
    {{job}}
except Exception as error:
    watchdog.explain(error)
    ranks.fail(error, world=ranks.detect_world())
"""
PRELOAD = ("nemo_kto.distributed.state", "nemo_kto.processes.watchdog")


def free_port() -> int:
    """Below the ports that the kernel gives to connections, one of which could take it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


class Ranks:
    """Ranks without a launcher: only their own output exists."""

    def __init__(
        self, folder: Path, job: str, size: int = 3, *, present: Sequence[int] = (), changes: Mapping[str, str] = {}
    ):
        self.folder = folder
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size), **changes}
        self.processes: dict[int, fork_server.Process] = {}
        for rank in present or range(size):
            env = environment() | given | {"RANK": str(rank), "NEMO_KTO_FORCE_CPU": "1", "OMP_NUM_THREADS": "1"}
            with (folder / f"output{rank}").open("w") as output:
                self.processes[rank] = fork_server.Process(
                    ["-c", PROGRAM.replace("{job}", job)],
                    cwd=folder,
                    env=env,
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                    preload=PRELOAD,
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)

    def await_file(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, self.output(0)
            time.sleep(0.01)

    def output(self, rank: int) -> str:
        return (self.folder / f"output{rank}").read_text()

    def ended(self, *which: int) -> list[tuple[int, str]]:
        return [(self.processes[rank].wait(60), self.output(rank)) for rank in which]


def test_a_rank_in_an_endless_loop_is_named_with_phase_and_stack(tmp_path: Path) -> None:
    with Ranks(tmp_path, "steps(5, sleep_for_ever)") as ranks:
        ranks.await_file("step1-0")
        found = ranks.ended(0, 1, 2)  # the one that sleeps, too
    output = min(text for _, text in found)
    assert [status for status, _ in found] == [1, 1, 1]
    first, second, *stack = output.splitlines()
    assert first == Message("nemo-kto", "rank 1 of 3", NAME, "'data'", "2 steps")
    assert second == Message("1", "last")
    assert [line.split(" in ")[1] for line in stack[-4:-1]] == ["<module>: ", "steps: ", "sleep_for_ever: "]
    assert stack[-1] == Message("trainer.timeout_minutes", "0.1", "min", "raise")
    assert len(output.splitlines()) <= 20
    assert all(output.removeprefix("nemo-kto: ") in text for _, text in found)


@pytest.mark.full
def test_a_stopped_rank_with_the_store_is_named(tmp_path: Path) -> None:
    with Ranks(tmp_path, "steps(10**6, lambda: None)") as ranks:
        ranks.await_file("step9-0")
        os.kill(ranks.processes[0].pid, signal.SIGSTOP)
        found = ranks.ended(1, 2)
    assert [status for status, _ in found] == [1, 1]
    for rank, (_, output) in enumerate(found, start=1):
        assert_names(output.rstrip().splitlines()[-1], "rank 0", "0.9 s", f"rank {rank} of 3", NAME, "'forward_backward'")


def test_a_killed_rank_is_named_by_ranks_that_lost_the_connection(tmp_path: Path) -> None:
    with Ranks(tmp_path, "steps(10**6, lambda: None)") as ranks:
        ranks.await_file("step9-0")
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        found = ranks.ended(0, 2)
    for status, output in found:
        assert status == 1
        assert Message("rank 1 of 3", NAME, "'forward_backward'") in output.splitlines()[-20:]


def test_the_error_of_a_failed_rank_reaches_the_others(tmp_path: Path) -> None:
    with Ranks(tmp_path, "steps(5, lambda: open('rows'))", size=2) as ranks:
        (status, output), (_, cause) = ranks.ended(0, 1)
    assert status == 1
    why = "FileNotFoundError: [Errno 2] No such file or directory: 'rows'"
    assert f"rank 1 of 2 on {socket.gethostname()} has ended: {why}" in output.splitlines()[-5:]
    assert cause.splitlines()[0] == "rank 1: Traceback (most recent call last):"
    assert why in cause


STOP_ONE = f"""
import datetime, signal, torch, torch.distributed as dist
from nemo_kto.distributed import state; from nemo_kto.processes import watchdog
state.init_distributed(layout=state.Layout(), seed=0, timeout=datetime.timedelta(seconds={TIMEOUT}))
with watchdog.phase("optimizer"):
    if rank == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.full
def test_the_launcher_reports_a_stopped_rank_and_does_not_wait_for_it(tmp_path: Path) -> None:
    env = stub_training(tmp_path, STOP_ONE)
    done = run([*CLI, "kto", *GOOD, "trainer.devices=2"], cwd=tmp_path, env=env, preload=TRAINING)
    assert done.returncode == 1
    assert done.stderr == Message("nemo-kto", "rank 1 of 2", NAME, "'optimizer'")


@pytest.mark.full
def test_ranks_that_never_start_are_named(tmp_path: Path) -> None:
    with Ranks(tmp_path, "steps(5, lambda: None)", size=4, present=(0, 2)) as ranks:
        (status, output), (other, _) = ranks.ended(0, 2)
    assert (status, other) == (2, 2)
    assert output == Message(
        "nemo-kto", "all", "4", "WORLD_SIZE", str(TIMEOUT), "trainer.timeout_minutes", "2", NAME, "1", "3"
    )


COLLECTIVE, WORK = 1.0, 1.5  # seconds that a collective waits; that the work takes
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
    _set_pg_timeout(timedelta(seconds=COLLECTIVE))
    assert watchdog._current is not None
    watchdog._current.timeout = 10 * COLLECTIVE if job == "long work" else COLLECTIVE
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
