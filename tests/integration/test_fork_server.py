"""The fork server of the tests: a forked command behaves like a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import commands, fork_server

SHOW = "import os, sys; print(sys.argv[1:], os.getcwd(), sorted(os.environ), __name__, sys.stdin.read())"
PROGRAMS = {
    "what it is given": SHOW,
    "output and status": "import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)",
    "text as status": "raise SystemExit('what is wrong')",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "much output": "print('x' * 300_000)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "end at once": "import os; os._exit(4)",
    "sitecustomize": "import sys; print(sys.modules['sitecustomize'].said)",
    "module beside it": "import beside; print(beside.__file__)",
}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "searched").mkdir()
    (tmp_path / "searched" / "sitecustomize.py").write_text("said = 'at the start'\n")
    (tmp_path / "searched" / "beside.py").write_text("")
    return {"PYTHONPATH": str(tmp_path / "searched"), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "MINE": "1"}


@pytest.mark.parametrize("form", ["-c", "-m", "script"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_forked_command_behaves_like_an_interpreter(tmp_path: Path, env: dict[str, str], program: str, form: str) -> None:
    (tmp_path / "program.py").write_text(program)
    begin = {"-c": ["-c", program], "-m": ["-m", "program"], "script": ["program.py"]}[form]
    command = [*begin, "--flag", "a b"]
    real = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    done = fork_server.run(command, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (real.returncode, real.stdout, real.stderr)


def test_an_error_is_shown(tmp_path: Path, env: dict[str, str]) -> None:
    done = fork_server.run(["-c", "raise RuntimeError('enough')"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("\nRuntimeError: enough\n")


def test_a_command_that_exceeds_its_timeout_is_killed(tmp_path: Path, env: dict[str, str]) -> None:
    program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server.run(["-c", program], cwd=tmp_path, env=env, timeout=1)
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_signal_reaches_the_command(tmp_path: Path, env: dict[str, str]) -> None:
    with (tmp_path / "said").open("w") as said:
        program = "import time; open('there', 'w'); time.sleep(60)"
        number = said.fileno()
        process = fork_server.Process(["-c", program], cwd=tmp_path, env=env, stdout=number, stderr=number)
    end = time.monotonic() + 30
    while not (tmp_path / "there").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == process.poll() == -signal.SIGTERM


def test_packages_may_be_installed_in_a_folder_of_pythonpath(tmp_path: Path) -> None:
    """As by pip install --target: the server imports them beforehand, and so do processes that begin with nothing."""
    (tmp_path / "carried.py").write_text("value = 41 + 1")
    program = (
        "from pathlib import Path; from tests.helpers.commands import environment, run, run_interpreter; import sys\n"
        f"shared = {{'cwd': Path({str(tmp_path)!r}).parent, 'env': environment()}}\n"
        "command = [sys.executable, '-c', 'import carried; print(carried.value)']\n"
        "print([done.stdout for done in (run(command, **shared, preload=('carried',)), run_interpreter(command, **shared))])"
    )
    command, env = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=commands.REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("['42\\n', '42\\n']\n", 0), done.stderr


def test_a_test_prepends_to_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/one:/two")
    assert commands.environment(Path("/first"))["PYTHONPATH"] == f"/first:{commands.REPOSITORY}:/one:/two"
    monkeypatch.delenv("PYTHONPATH")
    assert commands.environment()["PYTHONPATH"] == str(commands.REPOSITORY)
