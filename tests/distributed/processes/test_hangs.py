"""A stuck, stopped or killed rank is named by the others, with phase and stack, within the timeout."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

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
