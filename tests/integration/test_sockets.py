"""Only this machine can reach the launcher and its ranks."""

from __future__ import annotations

import ipaddress
import socket
import time
from pathlib import Path

import psutil

from tests.helpers.commands import CLI, GOOD, TRAINING, start, stub_training

# As a training job meets; then the ranks wait until they have been looked at.
MEET_AND_WAIT = """
import torch
import torch.distributed as dist
from nemo_kto.processes import ranks; from nemo_kto.distributed import state
state.init_distributed(layout=state.Layout(tensor=cfg.trainer.devices), seed=0)
total = torch.ones(1)
dist.all_reduce(total)
path = f"met{dist.get_rank()}"
with open(path + ".partial", "w") as met:
    file = os.environ.get(ranks.STORE_FILE)
    met.write(f"{total.item():g} {file and os.readlink(file)}")
os.rename(path + ".partial", path)
while not os.path.exists("seen"):
    time.sleep(0.02)
"""


def outside() -> str | None:
    """An interface with an address that other machines may know; None where there is only the loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family is socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback:
                return name
    return None


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which it waits for connections."""
    return {one.laddr.ip for one in process.net_connections(kind="inet") if one.status == psutil.CONN_LISTEN}


def watch(folder: Path, devices: int) -> tuple[list[str], list[set[str]]]:
    """What ``devices`` ranks said when they had met, and at which addresses each process listened: launcher, then ranks."""
    env = stub_training(folder, MEET_AND_WAIT)
    if (interface := outside()) is not None:  # as profiles of clusters do, for jobs of several machines
        env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    with (folder / "log").open("w") as log:
        command = [*CLI, "kto", *GOOD, f"trainer.devices={devices}"]
        process = start(command, cwd=folder, env=env, output=log.fileno(), errors=log.fileno(), preload=TRAINING)
    files = [folder / f"met{rank}" for rank in range(devices)]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(file.exists() for file in files), (folder / "log").read_text()
    launcher = psutil.Process(process.pid)
    found = [listening(one) for one in (launcher, *launcher.children(recursive=True))]
    met = [file.read_text() for file in files]
    (folder / "seen").touch()
    assert process.wait(timeout=30) == 0, (folder / "log").read_text()
    return met, found


def assert_loopback_alone(found: list[set[str]]) -> None:
    assert [address for addresses in found for address in addresses if not ipaddress.ip_address(address).is_loopback] == []


def test_launcher_and_ranks_listen_only_on_the_loopback_interface(tmp_path: Path) -> None:
    met, found = watch(tmp_path, 2)
    assert_loopback_alone(found)
    assert found[0] == set()  # the launcher listens nowhere
    assert len([addresses for addresses in found[1:] if addresses]) == 2  # gloo's own sockets were seen
    assert met == ["2 /memfd:nemo_kto (deleted)"] * 2  # a store without a name in any folder


def test_one_process_listens_only_on_the_loopback_interface(tmp_path: Path) -> None:
    """A run of one process has no store in a file."""
    met, found = watch(tmp_path, 1)
    assert met == ["1 None"]
    assert_loopback_alone(found)
