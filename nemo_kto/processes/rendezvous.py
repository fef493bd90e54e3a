"""Rendezvous of the ranks: on one machine through a file that their launcher holds in memory, and the loopback interface.

Torch's own launcher uses TCP: it listens on every address of the machine and unpickles what it receives.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta

import psutil
import torch.distributed as dist

from nemo_kto.errors import UserError
from nemo_kto.processes import ranks, watchdog

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0  # within which rank 0 must listen, at most the timeout of the collectives
WARN_SECONDS = 15.0  # of waiting for rank 0, after which a warning is logged
LOCAL = "127.0.0.1"


def loopback() -> str | None:
    """Return the name of the interface that has 127.0.0.1; None if it is down or does not exist."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(one.address == LOCAL for one in addresses)), None)


def join(backend: str, *, timeout: timedelta) -> None:
    """Create the default process group: of this process, of the ranks of this launcher, or of ranks started by others.

    The first two listen only on the loopback interface, even if the environment names other interfaces; ranks started by
    others keep the settings of torchrun or srun. From this call on, a watchdog reports the rank that the others wait for.
    Raises UserError if rank 0 cannot be reached or cannot listen, or if ranks are missing after ``timeout``.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    file = os.environ.get(ranks.STORE_FILE)
    store: dist.Store
    if "RANK" in os.environ and file is None:
        key = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if key not in _stores:
            _stores[key] = _connect(*key, rank=rank, size=size, seconds=min(timeout.total_seconds(), CONNECT_SECONDS))
        store = _stores[key]
        store_host = "the process that started the first machine's ranks" if _of_agent() else "rank 0"
    else:
        if (interface := loopback()) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=" matches the exact name instead of a prefix
        store = dist.HashStore() if file is None else dist.FileStore(file, size)
        store_host = "the launcher"
    store.set_timeout(timeout)
    global _joined
    _joined += 1  # the jobs of a sweep may share a store, and with torchrun --max-restarts the ranks of all attempts
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"nemo_kto/attempt{attempt}/job{_joined}", store)
    try:
        _await_all(own, rank=rank, size=size, seconds=timeout.total_seconds())
    except watchdog.StoreLost as error:
        raise UserError(
            f"all {size} ranks must start, but {store_host} ended before ({error}; rank {rank} on {socket.gethostname()}); "
            "see its output"
        ) from error
    watchdog.start(store=own, rank=rank, size=size, timeout=timeout, store_host=store_host)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)


def hosts_store() -> bool:
    """Return whether the store of the ranks ends with this process."""
    return "RANK" in os.environ and ranks.STORE_FILE not in os.environ and os.environ["RANK"] == "0" and not _of_agent()


def _await_all(store: dist.Store, *, rank: int, size: int, seconds: float) -> None:
    watchdog.check_in(store, rank)
    if store.add("joined", 1) == size:
        store.set("complete", "")
    deadline = time.monotonic() + seconds + 2 * hosts_store()  # 2 s in which the other ranks can find the missing ones too
    bounded = watchdog.BoundedStore(store=store, seconds=seconds)
    pause = 0.001
    while not bounded.call(lambda store: store.check(["complete"])):
        if time.monotonic() > deadline:
            present = {one: watchdog.read_check_in(bounded, one) for one in range(size)}
            absent = [str(one) for one, found in present.items() if found is None]
            shown = ", ".join(absent[:8]) + f" and {len(absent) - 8} more" * (len(absent) > 8)
            hosts = sorted({found.host for found in present.values() if found is not None})
            raise UserError(
                f"all {size} ranks (WORLD_SIZE) must start within {seconds:g} s (trainer.timeout_minutes), got "
                f"{size - len(absent)}, on {', '.join(hosts[:8])}; rank{'s' * (len(absent) > 1)} {shown} did not start; see "
                f"the output of their machines, and whether {size} ranks were started"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _of_agent() -> bool:
    """Return whether torchrun hosts the store instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(address: str, port: int, *, rank: int, size: int, seconds: float) -> dist.TCPStore:
    """Return the store of rank 0 or torchrun, which must be reachable within ``seconds``."""
    who = f"rank {rank} of {size} on {socket.gethostname()}"
    listener: socket.socket | None = None
    if rank == 0 and not _of_agent():  # torch's own attempt to listen would retry for minutes
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=2048)
        except OSError as error:
            raise UserError(
                f"MASTER_PORT must be a free port of the machine of rank 0, got {port} "
                f"({os.strerror(error.errno or 0)}; {who}); choose another port"
            ) from error
    _await_listener(address, port, seconds=seconds, listening=listener is not None, who=who)
    try:
        return watchdog.within(
            seconds,
            lambda: dist.TCPStore(
                address,
                port,
                is_master=listener is not None,
                master_listen_fd=None if listener is None else listener.detach(),
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
            ),
        )
    except watchdog.StoreLost as error:
        raise UserError(
            f"rank 0 must answer at MASTER_ADDR:MASTER_PORT, got something else at {address}:{port} "
            f"({error}; {who}); see whether another program listens at this port"
        ) from error


def _await_listener(address: str, port: int, *, seconds: float, listening: bool, who: str) -> None:
    """Wait until rank 0, which may start later, accepts connections. Torch's own attempt would warn every second."""
    pause, warn_at, deadline = 0.05, time.monotonic() + WARN_SECONDS, time.monotonic() + seconds
    where = f"{address}:{port}"
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            is_name_error = isinstance(error, (socket.gaierror, UnicodeError))
            if is_name_error and (getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > deadline):
                raise UserError(
                    f"MASTER_ADDR must be a name or address that every machine can resolve, got {address!r} "
                    f"({reason}; port {port}; {who}); set it to the address of the machine of rank 0"
                ) from error
        if (now := time.monotonic()) > deadline:
            late = f"within {seconds:g} s ({reason}; {who})"
            if listening:
                raise UserError(
                    f"MASTER_ADDR must be an address of the machine of rank 0, got {where}, at which rank 0 cannot connect "
                    f"to itself {late}; set it to the name or address of it"
                )
            raise UserError(
                f"rank 0 must listen at MASTER_ADDR:MASTER_PORT, got no connection to {where} {late}; see whether rank 0 "
                "runs, whether this is its machine, and whether a firewall blocks the port"
            )
        if now > warn_at and os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning(f"waiting up to {seconds:g} s for rank 0 at {where} ({reason})")
            warn_at = deadline
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


_stores: dict[tuple[str, int], dist.Store] = {}  # kept because the jobs of a sweep use the same port again
_joined = 0  # number of process groups that this process has created
