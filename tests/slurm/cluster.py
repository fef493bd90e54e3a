"""A SLURM cluster of two nodes on this machine for the tests, and its jobs.

Needs root and the packages slurm-wlm and munge (Debian's names).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests.helpers.commands import REPOSITORY, environment

SBATCH = REPOSITORY / "examples/slurm/train.sbatch"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter")
_FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
SchedulerParameters=sched_interval=2,batch_sched_delay=0
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
T = TypeVar("T")


def missing() -> str | None:
    """Why no SLURM can be started here; None where it can."""
    if absent := [name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "only root can start a SLURM"
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces of its own: {tried.stderr.strip()}"


_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def wait_for(what: str, found: Callable[[], T | None], *, seconds: float, details: Callable[[], str] = str) -> T:
    """The first result of ``found`` that is true; fails with ``what`` and the details when it takes too long."""
    end = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s\n{details()}"
        time.sleep(0.2)
    return result


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job in the queue.

    Attributes:
        cluster: where it runs.
        number: its id; N_M for a task of an array.
        log: what its script and its ranks say.
    """

    cluster: Cluster
    number: str
    log: Path

    def state(self) -> dict[str, str]:
        """What SLURM knows of the job, such as JobState, Restarts and ExitCode; empty once it has forgotten it."""
        shown = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number, check=False)
        return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_until(self, what: str, found: Callable[[], T | None], *, seconds: float) -> T:
        return wait_for(what, found, seconds=seconds, details=lambda: f"{self.state()}\n{self.output()[-4000:]}")

    def finish(self, *, seconds: float) -> dict[str, str]:
        """Wait for the end of the job, requeues included; its last state."""

        def ended() -> dict[str, str] | None:
            state = self.state()
            return state if state.get("JobState") in _FINAL else None

        return self.wait_until("the end of the job", ended, seconds=seconds)


class Cluster:
    """Two nodes, n1 and n2, of four processors and two pretended GPUs each."""

    def __init__(self, *, folder: Path) -> None:
        """Start it; takes a few seconds.

        Args:
            folder: for its files; empty.
        """
        self.folder = folder
        host = socket.gethostname().partition(".")[0]
        with _Ports(3) as ports:
            (folder / "slurm.conf").write_text(_CONF.format(host=host, ports=ports, folder=folder))
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        programs = folder / "bin"  # programs on the PATH of the jobs
        programs.mkdir()
        command = programs / "nemo-kto"
        command.write_text(f"#!{sys.executable}\nfrom nemo_kto.cli.main import main\n\nmain()\n")
        command.chmod(0o755)
        self.env = environment() | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.env["PATH"] = f"{programs}:{self.env['PATH']}:/usr/sbin"
        start = [*_NAMESPACES, str(Path(__file__).with_name("start_nodes.sh")), str(folder)]
        self._init = subprocess.Popen(start, env=self.env, stdin=subprocess.PIPE)
        wait_for("two idle nodes", self._idle, seconds=30, details=self._logs)

    def _idle(self) -> bool:
        assert self._init.poll() is None, self._logs()
        return len(self.run("sinfo", "-h", "-N", "-t", "idle", check=False).stdout.splitlines()) == 2

    def _logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        """End all its processes, and those of the jobs."""
        assert self._init.stdin is not None
        self._init.stdin.close()  # ends the first process of the namespace, and all others with it
        self._init.wait()

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command of SLURM."""
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done

    def submit(self, *command: str, cwd: Path, **variables: str) -> list[Submitted]:
        """sbatch with these arguments; the job, or those of an array ``--array=N-M``."""
        env = self.env | variables
        done = subprocess.run(
            ["sbatch", "--parsable", *command], env=env, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        number = done.stdout.strip()
        array = next((re.findall(r"\d+", word) for word in command if word.startswith("--array=")), None)
        if array is None:
            return [Submitted(cluster=self, number=number, log=cwd / f"nemo-kto-{number}.log")]
        tasks = [f"{number}_{task}" for task in range(int(array[0]), int(array[1]) + 1)]
        return [Submitted(cluster=self, number=task, log=cwd / f"{task}.log") for task in tasks]

    def processes(self, *, of: str) -> list[psutil.Process]:
        """Processes of a node: its daemon, and those started for jobs."""
        inside = psutil.Process(self._init.pid).children(recursive=True)
        daemons = [process for process in inside if process.cmdline()[:3] == ["slurmd", "-N", of]]
        tasks = [process for process in inside if process.environ().get("SLURMD_NODENAME") == of]
        return [*daemons, *{process.parent(): None for process in tasks}, *tasks]

    def kill_node(self, name: str) -> None:
        """Simulate a power failure of a node."""
        for process in self.processes(of=name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, name: str) -> None:
        """The machine comes back."""
        (first,) = psutil.Process(self._init.pid).children()
        self.run("nsenter", f"--target={first.pid}", "--mount", "--pid", "slurmd", "-N", name)


class _Ports:
    """Free TCP ports, bound until all are known."""

    def __init__(self, number: int) -> None:
        self._sockets = [socket.socket() for _ in range(number)]

    def __enter__(self) -> list[int]:
        for held in self._sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in self._sockets]

    def __exit__(self, *_: object) -> None:
        for held in self._sockets:
            held.close()
