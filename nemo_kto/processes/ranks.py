"""The ranks of a run: detected under torchrun or srun, or started by ``launcher.py``; their objects, limits, and exits.

Torchrun is detected before SLURM, because torchrun may itself run inside an srun step, and because SLURM's variables are
also set in processes that are not ranks, such as the batch script itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import logging
import multiprocessing
import os
import pickle  # nosec B403  # reads only what the process that started this rank has written
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from nemo_kto.errors import UserError, plural
from nemo_kto.processes import signals
from nemo_kto.redaction import redacted
from nemo_kto.utils.text import print_error, terminal_text

logger = logging.getLogger(__name__)

USAGE_ERROR = 2  # exit status after a mistake of the user that has been reported
PRINT_SECONDS = 5  # in which rank 0 can print the error before the launcher ends it because another rank is gone
INTERRUPTED = 128 + signal.SIGINT
ENDED = "ended"  # recorded by a rank that has reached the end of the run
# Environment variables of the ranks that ``launcher.py`` starts.
STARTED_BY = "NEMO_KTO_STARTED_BY"  # process id of the launcher
STARTED_AT = "NEMO_KTO_STARTED_AT"  # start of the run, in seconds since 1970
ERROR_FILE = "NEMO_KTO_ERROR_FILE"  # file for the message that the launcher prints
STORE_FILE = "NEMO_KTO_STORE_FILE"  # file of the store for the rendezvous of the ranks
OBJECTS_FILE = "NEMO_KTO_OBJECTS_FILE"  # file with the search path and the objects of the process that started them
_TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MAX_RANKS = 10**6
_UNSET = "start the ranks with torchrun or srun, or unset their variables"
_PR_SET_PDEATHSIG = 1
_SCONTROL_SECONDS = 60
_THREAD_SECONDS = 10  # for which a finished rank waits for threads before it names them
MIN_FILES = 256  # a run of two ranks has a hundred files and sockets open, and each further rank adds about ten
_MAX_FILES = 2**16
_RAISE_FILES = "raise it before the start, e.g. ulimit -n 4096"


@dataclass(frozen=True, kw_only=True)
class World:
    """The position of this process among the ranks."""

    rank: int
    size: int
    local_rank: int  # rank of this process among those of its machine
    local_size: int | None  # number of ranks on this machine; None if unknown
    sees_same: bool = False  # all ranks of a machine see the same GPUs, as under torchrun; under srun each may see one


def detect_world(environ: MutableMapping[str, str] | None = None) -> World | None:
    """Return this process's position among ranks started by a launcher; None if the process is the only one.

    In an srun step the variables that torch.distributed reads are set from SLURM's; an existing MASTER_ADDR is kept. Raises
    a UserError that names the variable if one is missing, not a number or out of range.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        # A batch script or interactive shell has no step, or one with one task.
        step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
        tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
        if "SLURM_PROCID" not in environ or step is None or not tasks.isdecimal() or int(tasks) <= 1:
            return None
        try:
            _from_slurm(environ)
        except (ValueError, LookupError) as error:
            raise UserError(f"SLURM_* must be the variables of an srun step, got others ({error}); {_UNSET}") from error
    size = _number(environ, "WORLD_SIZE", 1, _MAX_RANKS)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, size) if environ.get("LOCAL_WORLD_SIZE") else None
    world = World(
        rank=_number(environ, "RANK", 0, size - 1),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0, (local_size or size) - 1) if "LOCAL_RANK" in environ else 0,
        local_size=local_size,
        sees_same="TORCHELASTIC_RUN_ID" in environ,
    )
    if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]:
        raise UserError(f"the environment has RANK and WORLD_SIZE, so {' and '.join(absent)} must be set too; {_UNSET}")
    _number(environ, "MASTER_PORT", 0, 65535)
    return world


def _number(environ: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    value = environ[name]
    if not re.fullmatch(r"\d{1,9}", value) or not lowest <= int(value) <= highest:
        text = f"the environment variable {name} must be an integer from {lowest} to {highest}, got {value!r}"
        raise UserError(f"{text}; {_UNSET}")
    return int(value)


def _from_slurm(environ: MutableMapping[str, str]) -> None:
    from lightning_fabric.plugins.environments import SLURMEnvironment

    # Lightning requires --ntasks-per-node only for its own trainer; the ranks exist either way.
    environ.setdefault("SLURM_NTASKS_PER_NODE", environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_NTASKS"]))
    slurm = SLURMEnvironment(auto_requeue=False)
    environ["RANK"] = str(slurm.global_rank())
    environ["WORLD_SIZE"] = str(slurm.world_size())
    environ["LOCAL_RANK"] = str(slurm.local_rank())
    environ.setdefault("MASTER_ADDR", str(slurm.main_address))
    environ.setdefault("MASTER_PORT", str(slurm.main_port))


def has_launcher() -> bool:
    """Return whether :func:`~nemo_kto.processes.launcher.spawn_ranks` started this rank; it prints for all its ranks."""
    return os.environ.get(STARTED_BY) == str(os.getppid())


_began: float | None = None


def started_at() -> float:
    """Return the start of the run in seconds since 1970: that of its first process, or the last :func:`begin_now`."""
    if _began is not None:
        return _began
    return float(os.environ[STARTED_AT]) if has_launcher() else created()


def created() -> float:
    """Return when this process was created, in seconds since 1970."""
    import psutil

    return psutil.Process().create_time()


def resume_sibling(process: int, *, host: str, created: float) -> None:
    """Send SIGCONT to a stopped rank of this machine.

    The id may be reused or of another container: only a process with this one's parent and this creation time is signalled.
    """
    import psutil

    if host != socket.gethostname():
        return
    with contextlib.suppress(psutil.Error, ValueError):
        found = psutil.Process(process)
        if found.ppid() == os.getppid() and found.create_time() == created and found.status() == psutil.STATUS_STOPPED:
            found.resume()


def begin_now() -> None:
    """Set the start of the run to now: the next job of a sweep runs in a process that was started long ago."""
    global _began
    _began = time.time()


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its launcher is killed: nobody would notice the failure of another rank then.

    Raises UserError if this process only has the environment of a rank, for example if a rank starts a program.
    """
    left = [name for name in (STARTED_BY, STARTED_AT, ERROR_FILE, STORE_FILE, OBJECTS_FILE) if name in os.environ]
    if not left:
        return
    if not has_launcher():
        left += [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
        raise UserError(
            f"{STARTED_BY} must be the id of the process that started this one, {os.getppid()}, got "
            f"{os.environ.get(STARTED_BY)}: the variables of another run are still set; unset {', '.join(left)}"
        )
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not has_launcher():  # the launcher was killed before prctl
        os._exit(1)


def fail(error: BaseException, *, world: World | None) -> NoReturn:
    """End this process: for a UserError with its message and status 2, for other errors with a traceback and status 1.

    A launcher of this package prints the error of the rank that failed first, and not those that follow from it. Otherwise
    all ranks but rank 0 wait before they print: rank 0 prints the same error, if it has it, and its launcher ends them
    meanwhile. Secrets are redacted.
    """
    if isinstance(error, UserError):
        _report(str(error), world=world)
        exit_rank(USAGE_ERROR, world=world)
    whole = "".join(traceback.format_exception(error))
    text = redacted(whole)
    if has_launcher():
        _record(text)
    else:
        if os.environ.get(_TORCHRUN_ERROR_FILE):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error if text == whole else RuntimeError(text))  # type: ignore[arg-type]
        print_error(f"rank {world.rank}: {text}" if world is not None else text)
    exit_rank(1, world=world)


def end_early(message: str, *, world: World | None) -> NoReturn:
    """End this process with status 85, because it was asked to stop; ``message`` is empty if it was already printed."""
    if message:
        _report(message, world=world)
    exit_rank(signals.ENDED_EARLY, world=world)


def _report(message: str, *, world: World | None) -> None:
    if has_launcher():
        _record(message)
        return
    if world is not None and world.rank > 0:
        time.sleep(PRINT_SECONDS)
    print_error(f"nemo-kto: {message}")


def abort_rank(message: str, *, world: World, wait: bool) -> NoReturn:
    """End this rank with a message and status 1, from a watchdog thread while the main thread may hold any lock.

    ``wait``: another rank prints the same message; wait before printing, as :func:`fail` does.
    """
    _record(message)  # torchrun prints it in its own long report
    if not has_launcher():
        if wait:
            time.sleep(PRINT_SECONDS)
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, f"nemo-kto: {terminal_text(message)}\n".encode(errors="backslashreplace"))
    ending = threading.Thread(target=exit_rank, args=(1,), kwargs={"world": world}, daemon=True)
    ending.start()
    ending.join(2)  # exceeded only if output is blocked
    os._exit(1)


def confirm_end() -> None:
    """Tell the launcher that this rank ends as it should: a callback may end it with status 0 before."""
    if has_launcher():
        _record(ENDED)
    _watch_threads()


@functools.cache
def _watch_threads() -> None:
    """Name the threads that keep this process alive _THREAD_SECONDS after its main thread has ended."""

    ended = threading.Event()
    threading._register_atexit(ended.set)  # type: ignore[attr-defined]  # before a ThreadPoolExecutor waits for its threads

    def watch() -> None:
        ended.wait()
        time.sleep(_THREAD_SECONDS)
        others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
        if names := [repr(thread.name) for thread in others if not thread.daemon]:
            print_error(
                f"nemo-kto: rank {os.environ.get('RANK', '0')} is finished, but waits for {plural(len(names), 'thread')}: "
                f"{', '.join(names)}; end the threads of a callback in on_fit_end, or start them with daemon=True"
            )

    threading.Thread(target=watch, name="thread watch", daemon=True).start()


def _record(message: str) -> None:
    """Leave a message for the process that started this rank; torch's own function would add a traceback."""
    if has_launcher():
        Path(os.environ[ERROR_FILE]).write_text(message, encoding="utf-8", errors="backslashreplace")
    elif file := os.environ.get(_TORCHRUN_ERROR_FILE):
        Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")


def exit_rank(status: int, *, world: World | None) -> NoReturn:
    """End this process; a rank ends at once, because a regular exit may wait for ranks that will never answer."""
    if world is None:
        sys.exit(status)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process in the kernel."""
    with contextlib.suppress(OSError, AttributeError):  # exists only on Linux
        ctypes.CDLL(None).prctl(option, value)


def requeue(environ: Mapping[str, str]) -> str | None:
    """Requeue the SLURM job and return its id (of an array job with the task id); None, with a warning, if that failed."""
    job = environ.get("SLURM_JOB_ID")
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID')}"
    if job is None:
        logger.warning("trainer.requeue needs a SLURM job, got none (SLURM_JOB_ID is not set); nothing was requeued")
        return None
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False)
        problem = (done.stderr.strip() or f"status {done.returncode}") if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is not None:
        logger.warning(f"`{' '.join(command)}` failed, nothing was requeued: {problem}")
        return None
    return job


def check_open_files() -> str | None:
    """Return constraint, value and remedy if this user may not open enough files for a run (``ulimit -n``); else None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MIN_FILES:
        return None
    return f"must be at least {MIN_FILES} (open files of a process), got {hard}; {_RAISE_FILES}"


def raise_open_files() -> None:
    """Raise the limit of this process to its hard limit, at most 65536: many shells and services set a lower soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def explain_open_files(error: BaseException) -> BaseException:
    """Return a UserError that names the limit on open files if it caused the error; else the error itself."""
    cause: BaseException | None = error
    seen: list[BaseException] = []  # guards against a cycle, as of an error raised from its own consequence
    while cause is not None and cause not in seen:
        seen.append(cause)
        if (isinstance(cause, OSError) and cause.errno == errno.EMFILE) or "Too many open files" in str(cause):
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            found = UserError(f"ulimit -n must allow all files and sockets of a rank, got {soft} ({error}); {_RAISE_FILES}")
            found.__cause__ = error
            return found
        cause = cause.__cause__ or cause.__context__
    return error


OBJECTS_MODULE = "python_session"  # module from which the configuration takes the objects, as if they were in a file


def register_objects(objects: Mapping[str, object]) -> None:
    """Make the objects importable as python_session.NAME."""
    module = ModuleType(OBJECTS_MODULE, "Objects that were passed to nemo_kto.train.")
    vars(module).update(objects)
    sys.modules[OBJECTS_MODULE] = module


def pack_objects(objects: Mapping[str, object]) -> bytes:
    """Return the search path and the objects for the ranks; raise UserError if an object cannot be pickled."""
    pickled = b""
    if objects:
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(dict(objects))
        except Exception as error:  # an object may raise anything
            text = f"loss and callbacks must be picklable, because the ranks are other processes, got {', '.join(objects)}"
            raise UserError(f"{text}: {type(error).__name__}: {error}") from error
    return pickle.dumps(([os.path.abspath(folder) for folder in sys.path], pickled))


def unpack_objects() -> None:
    """In a rank: search modules where the process that started it does, after the rank's own places, and get its objects."""
    if (file := os.environ.get(OBJECTS_FILE)) is None:
        return
    folders, pickled = pickle.loads(Path(file).read_bytes())  # nosec B301
    sys.path += [folder for folder in folders if folder not in sys.path]
    if pickled:
        try:
            register_objects(pickle.loads(pickled))  # nosec B301
        except Exception as error:  # user code may raise anything
            text = "loss and callbacks must be usable in the ranks, which are other processes"
            raise UserError(f"{text}, got {type(error).__name__}: {error}; import what they need inside of them") from error
