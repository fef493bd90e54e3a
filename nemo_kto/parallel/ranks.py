"""The ranks of a run: found under torchrun or srun, or started here.

Torchrun is looked for before SLURM, since torchrun may itself run inside an srun step, and SLURM's variables are also set
where nothing was started for each of them, such as in the batch script itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from nemo_kto.errors import UserError

USAGE_ERROR = 2  # exit status of a mistake of the user, which has been said
SECONDS_TO_SPEAK = 5  # in which rank 0 says what is wrong before the launcher ends it because another rank is gone
INTERRUPTED = 128 + signal.SIGINT
_STARTED_BY = "NEMO_KTO_STARTED_BY"  # process id of the launcher, in the environment of the ranks it starts
_MAX_RANKS = 10**6
_NO_LOOPBACK = (
    "the ranks of one machine need the loopback interface with the address 127.0.0.1, got none; bring it up "
    "(ip link set lo up) or use trainer.devices=1"
)
_UNSET = "start the ranks with torchrun or srun, or unset what they left in the environment"
_LIKELY_CAUSE = {-signal.SIGTERM: 2, USAGE_ERROR: 0}  # other signals are 0 as well, errors 1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks this process is one of.

    Attributes:
        rank: of this process.
        size: number of ranks.
        local_rank: of this process among those of its machine.
        local_size: ranks on this machine; None where not known.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None


def detect_world(environ: MutableMapping[str, str] | None = None) -> World | None:
    """The ranks that somebody started, None if this process is the only one.

    In an srun step the variables that torch.distributed reads are set from SLURM's; a MASTER_ADDR that is set already stays.

    Raises:
        UserError: a variable is no number, or out of range, or missing; names it.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        if not _in_srun_step(environ):
            return None
        try:
            _from_slurm(environ)
        except (ValueError, LookupError) as error:
            raise UserError(
                f"the variables of SLURM must be those of a step of srun, got others ({error}); {_UNSET}"
            ) from error
    size = _number(environ, "WORLD_SIZE", 1, _MAX_RANKS)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, size) if environ.get("LOCAL_WORLD_SIZE") else None
    world = World(
        rank=_number(environ, "RANK", 0, size - 1),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0, (local_size or size) - 1) if "LOCAL_RANK" in environ else 0,
        local_size=local_size,
    )
    if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]:
        raise UserError(f"the environment has RANK and WORLD_SIZE, so {' and '.join(absent)} must be set too; {_UNSET}")
    _number(environ, "MASTER_PORT", 0, 65535)
    return world


def _number(environ: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    """The value of a variable of a launcher."""
    value = environ[name]
    if not re.fullmatch(r"\d{1,9}", value) or not lowest <= int(value) <= highest:
        text = f"the environment variable {name} must be an integer from {lowest} to {highest}, got {value!r}"
        raise UserError(f"{text}; {_UNSET}")
    return int(value)


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    """True in each of several tasks of srun; a batch script or an interactive shell has no step or a step of one task."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    return "SLURM_PROCID" in environ and step is not None and tasks.isdecimal() and int(tasks) > 1


def _from_slurm(environ: MutableMapping[str, str]) -> None:
    from lightning_fabric.plugins.environments import SLURMEnvironment

    # Lightning insists on --ntasks-per-node, for the sake of its own trainer; the ranks are there either way.
    environ.setdefault("SLURM_NTASKS_PER_NODE", environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_NTASKS"]))
    slurm = SLURMEnvironment(auto_requeue=False)
    environ["RANK"] = str(slurm.global_rank())
    environ["WORLD_SIZE"] = str(slurm.world_size())
    environ["LOCAL_RANK"] = str(slurm.local_rank())
    environ.setdefault("MASTER_ADDR", str(slurm.main_address))
    environ.setdefault("MASTER_PORT", str(slurm.main_port))


def spawn_ranks(count: int, command: Sequence[str]) -> None:
    """Start ``count`` ranks of a Python command on this machine and wait for them; nothing is restarted.

    When one fails, the others are ended at once. SIGINT and SIGTERM are passed on. The processors are shared: each rank
    gets as many threads as there are processors a rank, unless OMP_NUM_THREADS says otherwise.

    They meet in a folder that only this user can open, and listen on the loopback interface only.

    Args:
        count: number of ranks.
        command: arguments of the Python interpreter.

    Raises:
        SystemExit: a rank failed (with its status), a signal ended the run (128 + its number), or the loopback interface
            is down (2, with a message).
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from nemo_kto.parallel import rendezvous

    if rendezvous.loopback() is None:
        fail(UserError(_NO_LOOPBACK), world=None)
    rendezvous.register()
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # said better below
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a killed rank leaves behind becomes ours, and is ended below
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    with tempfile.TemporaryDirectory(prefix="nemo_kto_ranks_") as scratch:  # only this user can open it
        for_ranks = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            _STARTED_BY: str(os.getpid()),
            rendezvous.STORE_FILE: str(Path(scratch, "store")),
        }
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=f"nemo_kto_{os.getpid()}",
            rdzv_backend=rendezvous.BACKEND,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        try:
            with _environment(for_ranks):
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            sys.exit(_report(_first(error.failures.values()), count))
        except SignalException as error:
            sys.exit(128 + error.sigval.value)
        finally:
            _end_descendants()


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables that only the ranks have: the next job of a sweep may run in this process itself."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Failure(Protocol):
    """What torch says of a rank that failed."""

    local_rank: int
    exitcode: int
    error_file: str
    timestamp: int


def _first(failures: Iterable[_Failure]) -> _Failure:
    """The failure that caused the others.

    A rank that was killed is noticed late, after those that missed it; one that was ended by SIGTERM was not the cause.
    """
    return min(failures, key=lambda failure: (_LIKELY_CAUSE.get(failure.exitcode, failure.exitcode >= 0), _when(failure)))


def _when(failure: _Failure) -> int:
    """Nanoseconds; the time within the error file has whole seconds, and ranks fail within milliseconds of each other."""
    try:
        return os.stat(failure.error_file).st_mtime_ns
    except OSError:
        return failure.timestamp * 10**9


def _report(failure: _Failure, count: int) -> int:
    """Say which rank failed first and why; the exit status to end with."""
    who, code = f"nemo-kto: rank {failure.local_rank} of {count}", failure.exitcode
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        print(f"{who} was killed by {signal.Signals(-code).name}{hint}; the other ranks were ended", file=sys.stderr)
        return 1
    recorded = _recorded(failure.error_file)
    if recorded and (code == USAGE_ERROR or not recorded.startswith("Traceback")):  # words, which name the rank if need be
        print(f"nemo-kto: {recorded}", file=sys.stderr)
    elif recorded:
        print(f"{who} failed; the other ranks were ended. Its error:\n\n{recorded}", file=sys.stderr)
    elif code != USAGE_ERROR:
        print(f"{who} ended with status {code}; the other ranks were ended. Its error is above.", file=sys.stderr)
    return code


def _recorded(error_file: str) -> str | None:
    """The traceback of a rank, or the message of its UserError."""
    try:
        message = json.loads(Path(error_file).read_text())["message"]
        return message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def end_with_launcher() -> None:
    """Let this rank die when the process that started it is killed: nobody would notice a failure of another rank then."""
    launcher = os.environ.get(_STARTED_BY)
    if launcher is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # killed before the line above
        os._exit(1)


def fail(error: BaseException, *, world: World | None) -> NoReturn:
    """End this process: of a UserError with its message and status 2, of any other error with its traceback and status 1.

    A rank started by :func:`spawn_ranks` leaves the words to the process that started it, which prints those of the rank
    that failed first and not those of the ranks that failed because of it. Elsewhere the ranks after the first wait before
    they speak: the first says the same, if it knows, and the launcher ends them all meanwhile.
    """
    if isinstance(error, UserError):
        if _STARTED_BY in os.environ:
            _record(str(error))
        else:
            if world is not None and world.rank > 0:
                time.sleep(SECONDS_TO_SPEAK)
            print(f"nemo-kto: {error}", file=sys.stderr)
        exit_rank(USAGE_ERROR, world=world)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)  # type: ignore[arg-type]
    if _STARTED_BY not in os.environ:
        rank = f"rank {world.rank}: " if world is not None else ""
        print(rank + "".join(traceback.format_exception(error)), file=sys.stderr)
    exit_rank(1, world=world)


def give_up(message: str, *, world: World, wait: bool) -> NoReturn:
    """End this rank with a message and status 1, from a thread that is not the main thread, which may hold any lock.

    Args:
        message: names the rank that is to blame.
        world: of this rank.
        wait: another rank says the same; wait before speaking, as :func:`fail` does.
    """
    _record(message)  # torchrun prints it in its own report, which is long
    if _STARTED_BY not in os.environ:
        if wait:
            time.sleep(SECONDS_TO_SPEAK)
        os.write(2, f"nemo-kto: {message}\n".encode())
    ending = threading.Thread(target=exit_rank, args=(1,), kwargs={"world": world}, daemon=True)
    ending.start()
    ending.join(2)  # longer only where output is blocked
    os._exit(1)


def _record(message: str) -> None:
    """Leave a message where the launcher reads it; torch's own function would write a traceback."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")


def exit_rank(status: int, *, world: World | None) -> NoReturn:
    """End this process; a rank does so at once, because an orderly end may wait for ranks that will never answer."""
    if world is None:
        sys.exit(status)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(option, value)


def _end_descendants() -> None:
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
