"""How the ranks of one machine meet: in a file that only this user can open, and over the loopback interface.

Torch's own launcher meets over TCP: it listens at every address of the machine and unpickles what it is sent there.
"""

from __future__ import annotations

import os
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

STORE_FILE = "NEMO_KTO_STORE_FILE"  # where the ranks of this launcher meet, in their environment
BACKEND = "nemo_kto_one_machine"
_LOCAL = "127.0.0.1"


class _OneMachine(RendezvousHandler):
    """Tells torch's launcher that its ranks are all there are, without asking anybody."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = dist.HashStore()  # of this process

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # The ranks get the address as MASTER_ADDR and MASTER_PORT. Nothing listens there: they meet in the file.
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOCAL, 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other launcher could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Let torch's launcher know :data:`BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _OneMachine)


def loopback() -> str | None:
    """The name of the interface that has 127.0.0.1; None where it is down or there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(one.address == _LOCAL for one in addresses)), None)


def join(backend: str, *, timeout: timedelta) -> None:
    """Make the default process group: of this process, of the ranks of this launcher, or of those that others started.

    The first two listen on the loopback interface only, whatever the environment says of interfaces; others are left as
    torchrun or srun has set them up.

    Args:
        backend: of torch.distributed.
        timeout: how long a collective waits for a missing rank before it fails.
    """
    file = os.environ.get(STORE_FILE)
    if "RANK" in os.environ and file is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if (interface := loopback()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # this name, not every name that begins so
    store: dist.Store = dist.HashStore() if file is None else dist.FileStore(file, size)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
