"""File lock between processes on one or several machines, released when its holder dies.

    FILE          locked by the kernel, which releases the lock when the process ends for any reason
    FILE.owner    describes the holder; the holder updates its modification time every few seconds

On one machine the kernel's lock is reliable. Across machines it may not be: some network file systems lock only within each
machine or not at all, and others keep the lock of a machine that has gone down. In these cases the heartbeat of the owner,
which is the modification time of FILE.owner, decides. The package filelock has no heartbeat: its lock is the kernel's, or
a file that stays when its holder is killed.
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

from nemo_kto.utils.files import open_file, publish_file, remove_unpublished

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
GONE_SECONDS = 40.0  # without a heartbeat, after which the owner counts as dead
KERNEL_SECONDS = 120.0  # within which a file server releases the lock of a machine that went down
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 3.0  # for an owner that is exiting, as after a kill, or has not written its owner file yet
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks
_HELD_BY_OTHERS = (errno.EAGAIN, errno.EACCES, errno.ESTALE)  # ESTALE: the file was removed in the meantime
_JOBS = {"SLURM_JOB_ID": "SLURM job", "PBS_JOBID": "PBS job", "LSB_JOBID": "LSF job"}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The holder of a lock."""

    host: str
    pid: int
    machine: str  # boot id: it changes at every boot, and all containers of a machine share it
    job: str | None  # description of the job of the batch system; None outside of one
    since: float  # when the lock was taken, in seconds since 1970

    @classmethod
    def of(cls, text: str) -> Owner | None:
        """Return the owner that an owner file describes; None if it is absent, damaged or not written yet."""
        try:
            owner = cls(**json.loads(text))
            str(owner)
        except (ValueError, TypeError, RecursionError, OverflowError, OSError):  # the last two: an invalid time
            return None
        return owner

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}{f' ({self.job})' if self.job else ''} since {began}"


def this_process() -> Owner:
    """Return the :class:`Owner` that describes this process."""
    job = next((f"{name} {os.environ[key]}" for key, name in _JOBS.items() if os.environ.get(key)), None)
    return Owner(host=socket.gethostname(), pid=os.getpid(), machine=_machine(), job=job, since=time.time())


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # the file exists only on Linux
        return socket.gethostname()


def owner_file(file: Path) -> Path:
    """Return the path of the file that describes the holder of the lock ``file``."""
    return file.with_name(f"{file.name}.owner")


def last_holder(file: Path) -> tuple[Owner, bool] | None:
    """Return the holder that has not released the lock ``file``, and whether it is alive; None if there is none.

    On this machine it is alive if the kernel still holds the lock, which does not depend on the container of either
    process; elsewhere, and where that cannot be asked, if it has had a heartbeat within GONE_SECONDS.
    """
    text, beat = _read(owner_file(file))
    if (owner := Owner.of(text)) is None:
        return None
    is_free = _is_free(file, owner)
    return owner, time.time() - beat / 1e9 < GONE_SECONDS if is_free is None else not is_free


def certain_holder(file: Path) -> Owner | None:
    """Return the process that holds the lock ``file``, if the kernel of this machine says so at once; else None.

    A process that exits, as after a kill, has no command line and keeps its locks for a moment; it does not count.
    """
    owner = Owner.of(_read(owner_file(file))[0])
    if owner is not None and _is_free(file, owner) is False:
        with contextlib.suppress(OSError, ValueError, TypeError):  # the process of another container
            return owner if Path(f"/proc/{int(owner.pid)}/cmdline").read_bytes() else None
    return None


def _is_free(file: Path, owner: Owner) -> bool | None:
    """Ask the kernel whether the owner has released the lock; None if the kernel of this machine cannot tell."""
    # closing the file would release a lock that this process holds itself
    if owner.machine == _machine() and owner.pid != os.getpid():
        with contextlib.suppress(OSError):
            handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
            try:
                return _lock(handle)
            finally:
                os.close(handle)
    return None


@contextlib.contextmanager
def locked(file: Path, *, when_held: Callable[[str], None], private: bool = False) -> Iterator[None]:
    """Hold the lock ``file``, whose folder must exist, during the block; OSError if it or the owner file cannot be written.

    If another process holds the lock, ``when_held`` is called once with a description of it; the lock is then waited for,
    unless this call raises. A process does not exclude itself, and processes that it forks do not hold the lock. With
    ``private``, only the user may read the owner file.
    """
    owner, text = owner_file(file), json.dumps(vars(this_process()))
    handle = _acquire(file, when_held, 0o600 if private else 0o666)
    try:
        try:
            with publish_file(owner, private=private) as writing:
                writing.write_text(text, encoding="utf-8")
        except OSError:  # a full disk
            file.unlink(missing_ok=True)
            raise
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
    finally:
        if _read(owner)[0] == text:  # otherwise this process was suspended until another took over
            owner.unlink(missing_ok=True)
            file.unlink(missing_ok=True)  # before the release, so that a process that has opened it sees that it is unlinked
        os.close(handle)


@contextlib.contextmanager
def one_writer(target: Path, *, private: bool, part: str = "") -> Iterator[None]:
    """Let one process at a time write ``target``, a file or folder of a shared cache; the others wait.

    A process that waited should check whether ``target`` exists now. Temporary files of ``target`` that killed processes
    left are removed. Where no lock is available, several processes may do the same work. ``part`` is a suffix of the lock's
    name, for parts of ``target`` that may be written at the same time.
    """

    def report(who: str) -> None:
        logger.warning("waiting for %s, which writes %s", who, target)

    with contextlib.ExitStack() as lock:
        try:
            file = target.with_name(f".{target.name}{part}.lock")
            lock.enter_context(locked(file, when_held=report, private=private))
            remove_unpublished(target.parent, {target.name})
        except OSError as error:
            logger.warning("%s is written without a lock: %s", target, error.strerror)
        yield


def _acquire(file: Path, when_held: Callable[[str], None], mode: int) -> int:
    """Wait for the lock; return a file descriptor that holds it until closed."""
    watch, reported, began = _OwnerWatch(file), False, time.monotonic()
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
        free = False
        try:
            free, holder = watch.check(_lock(handle))
            free = free and os.fstat(handle).st_nlink > 0  # otherwise its last holder has removed it
            if holder is not None and not (free or reported) and time.monotonic() - began >= _GRACE_SECONDS:
                reported = True
                when_held(holder)
        finally:
            if not free:
                os.close(handle)
        if free:
            return handle
        time.sleep(_POLL_SECONDS)


def _lock(handle: int, lock: Callable[[int, int], object] = fcntl.lockf) -> bool | None:
    """Try to take the kernel's lock; return whether that succeeded, or None if the file system has no locks."""
    try:
        lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_OTHERS:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def lock_content(handle: int) -> bool:
    """Lock an open file under all its names until it is closed; False if another process holds it and does not exit.

    Where the file system has no locks, the file counts as locked.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while (free := _lock(handle, fcntl.flock)) is False and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return free is not False


class _OwnerWatch:
    """Observer of a lock's owner file, which detects heartbeats."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._began = self._changed = time.monotonic()
        self._seen: tuple[str, int] | None = None

    def check(self, taken: bool | None) -> tuple[bool, str | None]:
        """Return whether the lock may be taken, and its holder if known; ``taken``: whether the kernel granted it."""
        seen, now = _read(owner_file(self._file)), time.monotonic()
        if (owner := Owner.of(seen[0])) is None:
            return taken is not False, "another process"
        description = str(owner)
        same_machine = owner.machine == _machine()
        has_heartbeat = self._seen is not None and seen != self._seen
        if self._seen is None and not same_machine:
            logger.info("%s: waiting for a heartbeat of %s", owner_file(self._file), description)
        if seen != self._seen:
            self._seen, self._changed = seen, now
        if same_machine and taken is not None:
            return taken, description  # on one machine the kernel's answer is reliable
        if now - self._changed < GONE_SECONDS:
            return False, description if has_heartbeat else None
        if taken is not False:
            logger.warning("%s was locked by %s, which sends no heartbeat; it is taken over", self._file, description)
            return True, None
        remedy = f"which sends no heartbeat (if that machine is gone, remove {self._file})"
        return False, f"{description}, {remedy}" if now - self._began >= KERNEL_SECONDS else None


def _read(owner: Path) -> tuple[str, int]:
    """Return content and modification time in ns of the owner file; ("", 0) if it cannot be read.

    The file is opened because a network file system then queries its server.
    """
    try:
        with open_file(owner) as handle:
            return handle.read(2**16).decode(), os.fstat(handle.fileno()).st_mtime_ns
    except (OSError, ValueError):
        return "", 0
