"""Rendezvous at rank 0: one error says why the ranks cannot meet, with address, port and rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.processes import rendezvous
from tests.distributed.processes.test_hangs import Ranks, free_port
from tests.helpers.messages import raises

NAME = socket.gethostname()


@pytest.fixture
def taken() -> Iterator[int]:
    """Port of some other program, which listens and says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("rank", "address", "is_taken", "names"),
    [
        (0, "no-such-node.invalid", False, ["MASTER_ADDR", "'no-such-node.invalid'", "rank 0 of 2", "set it to"]),
        (1, "127.0.0.1", False, ["0.3 s", "127.0.0.1:", "MASTER_ADDR:MASTER_PORT", "rank 1 of 2", "firewall"]),
        (0, "192.0.2.1", False, ["MASTER_ADDR", "machine of rank 0", "192.0.2.1", "0.3 s"]),  # an unused address
        (0, "127.0.0.1", True, ["MASTER_PORT", "free port", "rank 0 of 2", "choose another port"]),
        (1, "127.0.0.1", True, ["rank 0 must answer", "MASTER_ADDR:MASTER_PORT", "something else", "127.0.0.1:"]),
    ],
    ids=["unknown address", "no listener", "another machine", "port in use", "another program"],
)
def test_ranks_that_cannot_meet(rank: int, address: str, is_taken: bool, names: list[str], taken: int) -> None:
    port = taken if is_taken else free_port()
    with raises(UserError, *names, str(port), NAME):
        rendezvous._connect(address, port, rank=rank, size=2, seconds=0.3)


def test_consecutive_jobs_use_the_same_port(tmp_path: Path) -> None:
    with Ranks(tmp_path, "[steps(2, lambda: None) for _ in range(2)]", size=2) as ranks:
        assert ranks.ended(0, 1) == [(0, ""), (0, "")]
