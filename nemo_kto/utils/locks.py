"""A lock that one process holds, on this machine or on another, and that is free again when its holder is gone.

    FILE          locked by the kernel, which frees it when the process ends, however it ends
    FILE.owner    who holds it; its time of change moves every few seconds while the holder lives

On one machine the kernel knows all. Between machines it may not: some network file systems have locks for each machine by
itself or none, others keep the lock of a machine that is gone. There the owner's signs of life decide.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_kto.utils.files import publish_file, remove_unpublished

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
GONE_SECONDS = 40.0  # without a sign of life
KERNEL_SECONDS = 120.0  # in which a file server frees the lock of a machine that is gone
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 3.0  # for an owner that is just ending, as after a kill, or has not said yet who it is
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # what file systems without locks answer
_HELD_BY_OTHERS = (errno.EAGAIN, errno.EACCES, errno.ESTALE)  # the last of a file that was removed meanwhile
_JOBS = {"SLURM_JOB_ID": "SLURM job", "PBS_JOBID": "PBS job", "LSB_JOBID": "LSF job"}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a lock.

    Attributes:
        host, pid: of the process.
        machine: changes with every start of the machine; the containers of a machine share it.
        job: of the batch system, in words; None outside of one.
        since: seconds since 1970.
    """

    host: str
    pid: int
    machine: str
    job: str | None
    since: float

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}{f' ({self.job})' if self.job else ''} since {began}"


def this_process() -> Owner:
    """What this process says of itself."""
    job = next((f"{name} {os.environ[key]}" for key, name in _JOBS.items() if os.environ.get(key)), None)
    return Owner(host=socket.gethostname(), pid=os.getpid(), machine=_machine(), job=job, since=time.time())


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # only Linux has it
        return socket.gethostname()


def owner_file(file: Path) -> Path:
    """Where it is noted who holds the lock ``file``."""
    return file.with_name(f"{file.name}.owner")


@contextlib.contextmanager
def locked(file: Path, *, when_held: Callable[[str], None], private: bool = False) -> Iterator[None]:
    """Hold the lock ``file`` during the block; its folder must exist.

    A process does not exclude itself, and processes that it forks do not hold the lock.

    Args:
        when_held: called once with who holds the lock, when another process does. It may raise; else the lock is waited for.
        private: only the user may read who holds it.

    Raises:
        OSError: the lock cannot be opened, or its owner not be written.
    """
    owner, text = owner_file(file), json.dumps(vars(this_process()))
    handle = _acquire(file, when_held, 0o600 if private else 0o666)
    try:
        with publish_file(owner, private=private) as writing:
            writing.write_text(text, encoding="utf-8")
        with _heartbeat(owner):
            yield
    finally:
        if _read(owner)[0] == text:  # this process was not stopped for so long that another took over
            owner.unlink(missing_ok=True)
            file.unlink(missing_ok=True)  # before it is free: who has opened it sees that it has no name any more
        os.close(handle)


@contextlib.contextmanager
def one_writer(target: Path, *, private: bool, part: str = "") -> Iterator[None]:
    """Let one process at a time write ``target``, a file or folder of a cache that many may fill; the others wait.

    Whoever waited should look whether it is there now. What killed processes have left of the file is removed. Where no lock
    can be had, several do the same work. ``part``: letters that tell apart what may be written at the same time.
    """
    with contextlib.ExitStack() as lock:
        try:
            file = target.with_name(f".{target.name}{part}.lock")
            lock.enter_context(locked(file, when_held=lambda who: _say_wait(who, target), private=private))
            remove_unpublished(target.parent, {target.name})
        except OSError as error:
            logger.warning("%s is written without a lock: %s", target, error.strerror)
        yield


@contextlib.contextmanager
def _heartbeat(owner: Path) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(owner)

    heart = threading.Thread(target=beat, name="lock", daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()


def _say_wait(who: str, target: Path) -> None:
    logger.warning("waiting for %s, which writes %s", who, target)


def _acquire(file: Path, when_held: Callable[[str], None], mode: int) -> int:
    """The handle that holds the lock until it is closed."""
    watch, told = _Watch(owner_file(file)), False
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
        free = False
        try:
            free, held = _verdict(_lock(handle), watch, file)
            free = free and os.fstat(handle).st_nlink > 0  # else its last holder has removed it
            if held is not None and not (free or told) and watch.seconds >= _GRACE_SECONDS:
                told = True
                when_held(held)
        finally:
            if not free:
                os.close(handle)
        if free:
            return handle
        time.sleep(_POLL_SECONDS)


def _verdict(taken: bool | None, watch: _Watch, file: Path) -> tuple[bool, str | None]:
    """Whether the lock may be had, and who holds it if that is known; ``taken``: what the kernel says."""
    owner = watch.look()
    if owner is None:  # or it is not said yet
        return taken is not False, "another process"
    if owner.machine == _machine() and taken is not None:
        return taken, str(owner)  # the owner has ended, or lives
    if watch.quiet_seconds < GONE_SECONDS:
        return False, str(owner) if watch.lives else None
    if taken is not False:
        logger.warning("%s was locked by %s, which gives no sign of life; it is taken over", file, owner)
        return True, None
    remedy = f"which gives no sign of life (if that machine is gone, remove {file})"
    return False, f"{owner}, {remedy}" if watch.seconds >= KERNEL_SECONDS else None


def _lock(handle: int) -> bool | None:
    """Whether this process has the kernel's lock now; None where the file system has none."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_OTHERS:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


class _Watch:
    """Looks at the owner of a lock again and again, for signs of life."""

    def __init__(self, owner: Path) -> None:
        self.lives = False  # a sign was seen at the last look
        self._owner = owner
        self._began = self._changed = time.monotonic()
        self._seen: tuple[str, int] | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def quiet_seconds(self) -> float:
        return time.monotonic() - self._changed

    def look(self) -> Owner | None:
        """The owner; None where none is noted, or what is there is none."""
        seen = _read(self._owner)
        try:
            owner = Owner(**json.loads(seen[0]))
            str(owner)
        except (ValueError, TypeError, RecursionError, OverflowError, OSError):  # the last two of a time that is none
            return None
        self.lives = self._seen is not None and seen != self._seen
        if self._seen is None and owner.machine != _machine():
            logger.info("%s: waiting for a sign of life of %s", self._owner, owner)
        if seen != self._seen:
            self._seen, self._changed = seen, time.monotonic()
        return owner


def _read(owner: Path) -> tuple[str, int]:
    """Content and time of change; opened, because a network file system then asks its server."""
    try:
        with owner.open(encoding="utf-8") as handle:
            return handle.read(), os.fstat(handle.fileno()).st_mtime_ns
    except (OSError, ValueError):
        return "", 0
