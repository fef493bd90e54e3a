"""Rendezvous at rank 0: one error says why the ranks cannot meet, with address, port and rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.processes.test_hangs import Ranks, free_port
from tests.helpers.messages import Message, assert_names

MEET = """
    from nemo_kto.processes import rendezvous
    rendezvous.CONNECT_SECONDS, rendezvous.WARN_SECONDS = 1.5, 0.5
    steps(2, lambda: None)
"""
NAME = socket.gethostname()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Some other program that listens and says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server


def run_rank(folder: Path, **changes: str) -> tuple[int, str]:
    """How rank 0 of two ended, or rank 1 with present=(1,)."""
    rank = int(changes.pop("rank"))
    with Ranks(folder, MEET, size=2, present=(rank,), changes=changes) as ranks:
        ((status, text),) = ranks.ended(rank)
    return status, text


def test_an_unknown_address_is_reported_immediately(tmp_path: Path) -> None:
    status, text = run_rank(tmp_path, rank="0", MASTER_ADDR="no-such-node.invalid", MASTER_PORT="29500")
    assert status == 2
    assert text == Message("nemo-kto", "MASTER_ADDR", "'no-such-node.invalid'", "29500", "rank 0 of 2", NAME, "set")


def test_a_port_without_listener_is_reported_after_a_timeout(tmp_path: Path) -> None:
    port = free_port()
    status, text = run_rank(tmp_path, rank="1", MASTER_PORT=str(port))
    assert status == 2
    assert text == (
        Message("1.5", "0", f"127.0.0.1:{port}", "nemo-kto", "MASTER_ADDR:MASTER_PORT", "no", "1", "2", NAME, "firewall")
    )


def test_an_address_of_another_machine_is_reported_by_rank_0(tmp_path: Path) -> None:
    status, text = run_rank(tmp_path, rank="0", MASTER_ADDR="192.0.2.1", MASTER_PORT=str(free_port()))  # an unused address
    assert status == 2
    assert_names(text.splitlines()[-1], "nemo-kto", "MASTER_ADDR", "0", "192.0.2.1")


def test_a_port_in_use_is_reported_by_rank_0(tmp_path: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert run_rank(tmp_path, rank="0", MASTER_PORT=str(port)) == (
        2,
        Message("nemo-kto", "MASTER_PORT", "0", f"{port}", "2", NAME, "choose"),
    )


def test_another_program_at_the_port_is_reported_by_the_other_ranks(tmp_path: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    status, text = run_rank(tmp_path, rank="1", MASTER_PORT=str(port))
    assert status == 2
    assert_names(
        text.splitlines()[-1], "nemo-kto", "0", "answer", "MASTER_ADDR:MASTER_PORT", "something", f"127.0.0.1:{port}"
    )


def test_consecutive_jobs_use_the_same_port(tmp_path: Path) -> None:
    with Ranks(tmp_path, "[steps(2, lambda: None) for _ in range(2)]", size=2) as ranks:
        assert ranks.ended(0, 1) == [(0, ""), (0, "")]
