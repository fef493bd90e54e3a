"""Run Python commands in separate processes that need not import torch again.

A fork server is a Python process that only imports the requested modules. For each command it forks a process, which
becomes what a new interpreter would be: arguments, working directory, environment, search path and sitecustomize, output,
exit status. That takes milliseconds, where an interpreter that imports torch takes seconds. The ranks that such a process
starts through the package's launcher are forked as well, and are its children as they would be otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

_SIZE = 1 << 20


class Process:
    """A command that was started; its output goes where ``stdout`` and ``stderr`` (file numbers) lead."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str],
        stdout: int,
        stderr: int,
        preload: Sequence[str] = (),
        ranks: bool = False,
    ) -> None:
        self._answers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers.connect(_server())
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": env, "preload": list(preload), "ranks": ranks}
        socket.send_fds(self._answers, [json.dumps(request).encode()], [stdout, stderr])
        self.pid = int(self._answers.recv(_SIZE))
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """How it ended, as subprocess gives it."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            self.returncode = int(self._answers.recv(_SIZE))
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            return self.wait(1)
        return self.returncode


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: dict[str, str],
    preload: Sequence[str] = (),
    ranks: bool = False,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """The finished process with its output; waits until every process that holds the output has ended.

    Args:
        arguments: of the interpreter: ``-m MODULE ...``, ``-c CODE ...`` or ``SCRIPT ...``; ``-P`` may precede them.
        cwd: working directory.
        env: the whole environment.
        preload: modules imported before the fork; the command must not depend on their absence.
        ranks: the process may start ranks of its own.
        timeout: seconds.
    """
    output = ["", ""]
    ends = [os.pipe(), os.pipe()]
    try:
        process = Process(arguments, cwd=cwd, env=env, preload=preload, ranks=ranks, stdout=ends[0][1], stderr=ends[1][1])
    finally:
        for _, write in ends:
            os.close(write)

    def read(number: int) -> None:
        with os.fdopen(ends[number][0], encoding="utf-8") as stream:
            output[number] = stream.read()

    readers = [threading.Thread(target=read, args=(number,), daemon=True) for number in (0, 1)]
    for reader in readers:
        reader.start()
    try:
        status = process.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        if any(reader.is_alive() for reader in readers):
            raise TimeoutError
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        raise subprocess.TimeoutExpired(list(arguments), timeout, *output) from None
    return subprocess.CompletedProcess(list(arguments), status, *output)


def search_path(*before: Path) -> str:
    """PYTHONPATH with these folders in front of those that this process has, where packages may be installed."""
    return os.pathsep.join([*map(str, before), *filter(None, [os.environ.get("PYTHONPATH")])])


@cache
def _server() -> str:
    """Address of the server, which is started on first use and ends with this process."""
    address = os.path.join(tempfile.mkdtemp(prefix="forked_"), "socket")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    from tests.helpers.rank_pool import ensure_forkserver  # imports torch, which this server does when it is needed

    ensure_forkserver()
    forker: Any = forkserver._forkserver  # type: ignore[attr-defined]
    given = [address, forker._forkserver_address, str(forker._forkserver_alive_fd)]
    server: subprocess.Popen[bytes] = subprocess.Popen(
        [sys.executable, __file__, *given],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[forker._forkserver_alive_fd],
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    _KEPT.append(server)
    return address


_KEPT: list[subprocess.Popen[bytes]] = []  # closing its input ends the server


def _serve(address: str, alive: IO[bytes]) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; returns only in the new process, with the request and its output's file descriptors."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        sources: list[Any] = [listener, alive]
        readable, _, _ = select.select(sources, [], [])
        if alive in readable:
            os.unlink(address)
            os.rmdir(os.path.dirname(address))
            os._exit(0)
        connection, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(connection, _SIZE, 2)
        request = json.loads(message)
        # Nothing is shown, and the filters that the modules set on being imported stay.
        with mock.patch.object(warnings, "showwarning"):
            for name in request["preload"]:
                importlib.import_module(name)
        gc.freeze()  # a garbage collection over torch would copy its pages
        waiter = os.fork()  # waits for the process, so that the server can serve others
        if not waiter and not (process := os.fork()):
            listener.close()
            connection.close()
            return request, files
        for file in files:
            os.close(file)
        if not waiter:
            os.close(1)
            connection.send(str(process).encode())
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            with contextlib.suppress(OSError):
                connection.send(str(status).encode())
            os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Turn this process into a new interpreter with these arguments."""
    signal.pthread_sigmask(signal.SIG_SETMASK, request.get("blocked", []))
    null = os.open(os.devnull, os.O_RDONLY)
    given = (*((0, null), (1, files[0]), (2, files[1])), *zip(request.get("pass_fds", []), files[2:], strict=True))
    moved = [(target, fcntl.fcntl(file, fcntl.F_DUPFD, 100)) for target, file in given]  # out of the way of the targets
    for file in (null, *files):
        os.close(file)
    for target, file in moved:
        os.dup2(file, target)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background hands it down as ignored
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if (device := sys.modules.get("nemo_kto.device.device")) is not None:
        device.on_gpu.cache_clear()  # it depends on the environment
    if (workers := sys.modules.get("nemo_kto.data.tokens.workers")) is not None:
        setattr(workers, "_START_METHOD", "forkserver")  # noqa: B010
    searched = [folder for folder in request["env"].get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = ["", *searched, *_INSTALLED]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    is_safe = request["arguments"][0] == "-P"
    first, *others = request["arguments"][is_safe:]
    sys.argv = list(others) if first == "-m" else [first, *others]
    added = {"-m": os.getcwd(), "-c": ""}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[:1] = [] if is_safe else [added]
    if first == "-m":
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        del sys.argv[1]
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


_INSTALLED: list[str] = []  # the search path without what PYTHONPATH and the script add to it


class _Rank:
    """Replaces subprocess.Popen in the launcher: a rank forked from a process without threads."""

    forker: socket.socket
    one_thread = threading.Lock()

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: dict[str, str],
        start_new_session: bool,
        pass_fds: Sequence[int],
        stdout: int | None,
        stderr: int | None,
    ) -> None:
        assert args[:2] == [sys.executable, "-u"]
        assert start_new_session
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]  # which a new process inherits
        request = {"arguments": args[2:], "cwd": os.getcwd(), "env": env, "blocked": blocked, "pass_fds": list(pass_fds)}
        with self.one_thread:
            socket.send_fds(self.forker, [json.dumps(request).encode()], [stdout or 1, stderr or 2, *pass_fds])
            self.args, self.pid = args, int(self.forker.recv(_SIZE))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _fork_ranks() -> tuple[dict[str, Any], list[int]]:
    """Fork a process that forks the ranks; returns in the ranks with their request, and in the launcher.

    A rank's parent ends at once, and the rank is adopted by the launcher, which is a child subreaper
    (nemo_kto/processes/ranks.py).
    """
    parent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _Rank.forker = ours
        from nemo_kto.processes import launcher

        setattr(launcher, "Popen", _Rank)  # noqa: B010
        return {}, []
    ours.close()
    while True:
        message, files, _, _ = socket.recv_fds(theirs, _SIZE, 16)
        if not message:
            os._exit(0)
        if not (child := os.fork()):
            if os.fork():
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            os.setsid()
            theirs.send(str(os.getpid()).encode())
            theirs.close()
            return json.loads(message), files
        os.waitpid(child, 0)
        for file in files:
            os.close(file)


def _status_of(program: Callable[[], None]) -> int:
    """The exit status of an interpreter that runs ``program``."""
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End like the interpreter, but without freeing modules, which takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


def _use_forkserver(address: str, alive: int) -> None:
    """Let multiprocessing fork from the forkserver of the process that started this one, in the forked commands too."""
    forker: Any = forkserver._forkserver  # type: ignore[attr-defined]
    forker._forkserver_address, forker._forkserver_alive_fd = address, alive
    forker.ensure_running = resource_tracker.ensure_running


def _main() -> None:
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    _use_forkserver(sys.argv[2], int(sys.argv[3]))
    given = {os.path.abspath(folder) for folder in search_path().split(os.pathsep)}
    _INSTALLED[:] = [folder for folder in sys.path[1:] if folder not in given]
    request, files = _serve(sys.argv[1], sys.stdin.buffer)
    if request["ranks"]:
        # Ranks hold the output open; the process that forks them must not.
        rank, its_files = _fork_ranks()
        if rank:
            for file in files:
                os.close(file)
            request, files = rank, its_files
    _end(_status_of(lambda: _become(request, files)))


if __name__ == "__main__":
    _main()
