"""How the ranks of one machine meet: in a file that only this user can open, and over the loopback interface.

Torch's own launcher meets over TCP: it listens at every address of the machine and unpickles what it is sent there.
"""

from __future__ import annotations

import os
from datetime import timedelta

import psutil
import torch.distributed as dist

STORE_FILE = "NEMO_KTO_STORE_FILE"  # where the ranks of this launcher meet, in their environment
LOCAL = "127.0.0.1"


def loopback() -> str | None:
    """The name of the interface that has 127.0.0.1; None where it is down or there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(one.address == LOCAL for one in addresses)), None)


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
