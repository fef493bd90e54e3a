"""Rendezvous of the ranks: on one machine through a file that their launcher holds in memory, and the loopback interface.

Torch's own launcher uses TCP: it listens on every address of the machine and unpickles what it receives.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist

from nemo_kto.errors import UserError
from nemo_kto.processes import ranks, watchdog

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0  # within which rank 0 must listen, at most the timeout of the collectives
TELL_SECONDS = 15.0  # of waiting for rank 0, after which a warning is logged
LOCAL = "127.0.0.1"


def loopback() -> str | None:
    """Return the name of the interface that has 127.0.0.1; None if it is down or does not exist."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(one.address == LOCAL for one in addresses)), None)


def join(backend: str, *, timeout: timedelta) -> None:
    """Create the default process group: of this process, of the ranks of this launcher, or of ranks started by others.

    The first two listen only on the loopback interface, even if the environment names other interfaces; ranks started by
    others keep the settings of torchrun or srun. From this call on, a watchdog reports the rank that the others wait for.

    Args:
        backend: backend of torch.distributed.
        timeout: how long a collective waits for a missing rank before it fails.

    Raises:
        UserError: the rendezvous failed: rank 0 cannot be reached or cannot listen, or ranks are missing after the timeout.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    file = os.environ.get(ranks.STORE_FILE)
    if "RANK" in os.environ and file is None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        meeting = Rendezvous(address=address, port=port, rank=rank, size=size)
        if meeting not in _stores:
            _stores[meeting] = _tcp_store(meeting, min(timeout.total_seconds(), CONNECT_SECONDS))
        store = _stores[meeting]
        holder = "the process that started the first machine's ranks" if _of_agent() else "rank 0"
    else:
        if (interface := loopback()) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=" matches the exact name instead of a prefix
        store = dist.HashStore() if file is None else dist.FileStore(file, size)
        holder = "the launcher"
    store.set_timeout(timeout)
    global _joined
    _joined += 1  # the jobs of a sweep may share a store
    own = dist.PrefixStore(f"nemo_kto/job{_joined}", store)
    try:
        _await_all(own, rank=rank, size=size, timeout=timeout)
    except watchdog.StoreLost as error:
        raise UserError(
            f"all {size} ranks must start, but {holder} was lost meanwhile ({error}; rank {rank} on "
            f"{socket.gethostname()}); see its output"
        ) from error
    watchdog.start(store=own, rank=rank, size=size, timeout=timeout, holder=holder)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)


def holds_store() -> bool:
    """Return whether the store of the ranks ends with this process."""
    return "RANK" in os.environ and ranks.STORE_FILE not in os.environ and os.environ["RANK"] == "0" and not _of_agent()


def _await_all(store: dist.Store, *, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until every rank has joined."""
    watchdog.check_in(store, rank)
    if store.add("joined", 1) == size:
        store.set("complete", "")
    stay = 2 * holds_store()  # seconds, in which the other ranks can find the missing ones as well
    deadline = time.monotonic() + timeout.total_seconds() + stay
    bounded = watchdog.BoundedStore(store=store, seconds=timeout.total_seconds())
    pause = 0.001
    while not bounded.call(lambda store: store.check(["complete"])):
        if time.monotonic() > deadline:
            present = {one: bounded.read(f"present/{one}") for one in range(size)}
            absent = [str(one) for one, text in present.items() if text is None]
            shown = ", ".join(absent[:8]) + f" and {len(absent) - 8} more" * (len(absent) > 8)
            there = sorted({watchdog.check_in_of(text).host for text in present.values() if text is not None})
            raise UserError(
                f"all {size} ranks (WORLD_SIZE) must start within {timeout.total_seconds():g} s (trainer.timeout_minutes), "
                f"got {size - len(absent)}, on {', '.join(there[:8])}; rank{'s' * (len(absent) > 1)} {shown} did not come; "
                "see the output of their machines, and whether as many were started"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _of_agent() -> bool:
    """Return whether torchrun holds the store instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address of a rendezvous of several machines, and the rank that joins it.

    Attributes:
        address, port: MASTER_ADDR and MASTER_PORT.
        rank: rank of this process.
        size: number of ranks.
    """

    address: str
    port: int
    rank: int
    size: int

    def who(self) -> str:
        """Return a description of this rank for an error."""
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


_stores: dict[Rendezvous, dist.Store] = {}  # kept because the jobs of a sweep use the same port again
_joined = 0  # number of process groups that this process has created


def _tcp_store(meeting: Rendezvous, wait: float) -> dist.Store:
    """Connect to the store of rank 0 or torchrun, which must be reachable within ``wait`` seconds."""
    deadline = time.monotonic() + wait
    _resolve(meeting, deadline)
    listener = _listen(meeting) if meeting.rank == 0 and not _of_agent() else None
    _reach(meeting, deadline, wait, listening=listener is not None)
    try:
        return watchdog.within(
            wait,
            lambda: dist.TCPStore(
                meeting.address,
                meeting.port,
                is_master=listener is not None,
                master_listen_fd=None if listener is None else listener.detach(),
                timeout=timedelta(seconds=wait),
                wait_for_workers=False,
            ),
        )
    except watchdog.StoreLost as error:
        raise UserError(
            f"rank 0 must answer at MASTER_ADDR:MASTER_PORT, got something else at {meeting.address}:{meeting.port} "
            f"({error}; {meeting.who()}); see whether another program listens at this port"
        ) from error


def _resolve(meeting: Rendezvous, deadline: float) -> None:
    """Raise a UserError if the host name cannot be resolved; a busy name server is asked again."""
    while True:
        try:
            socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            if getattr(error, "errno", None) == socket.EAI_AGAIN and time.monotonic() < deadline:
                time.sleep(1)
                continue
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"MASTER_ADDR must be a name or address that every machine can resolve, got {meeting.address!r} ({reason}; "
                f"port {meeting.port}; {meeting.who()}); set it to the address of the machine of rank 0"
            ) from error
        return


def _listen(meeting: Rendezvous) -> socket.socket:
    """Create the listening socket of rank 0. Torch's own attempt would retry for minutes."""
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", meeting.port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=2048
        )
    except OSError as error:
        raise UserError(
            f"MASTER_PORT must be a free port of the machine of rank 0, got {meeting.port} "
            f"({os.strerror(error.errno or 0)}; {meeting.who()}); choose another port"
        ) from error


def _reach(meeting: Rendezvous, deadline: float, wait: float, *, listening: bool) -> None:
    """Wait until rank 0, which may start later, accepts connections. Torch's own attempt would warn every second."""
    pause, message = 0.05, time.monotonic() + TELL_SECONDS
    where = f"{meeting.address}:{meeting.port}"
    while True:
        try:
            socket.create_connection((meeting.address, meeting.port), timeout=5).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        now = time.monotonic()
        if now > deadline and listening:
            raise UserError(
                f"MASTER_ADDR must be an address of the machine of rank 0, got {where}, where rank 0 does not find itself "
                f"within {wait:g} s ({reason}; {meeting.who()}); set it to the name or address of that machine"
            )
        if now > deadline:
            raise UserError(
                f"rank 0 must listen at MASTER_ADDR:MASTER_PORT, got no connection to {where} within {wait:g} s ({reason}; "
                f"{meeting.who()}); see whether rank 0 runs, whether this is its machine, and whether a firewall is between"
            )
        if now > message and os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning(f"waiting up to {wait:g} s for rank 0 at {where} ({reason})")
            message = deadline
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
