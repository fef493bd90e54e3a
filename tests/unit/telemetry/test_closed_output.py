"""Closed, full and unread standard output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import fork_server
from tests.helpers.messages import assert_names

REPOSITORY = Path(__file__).resolve().parents[3]
FULL = "standard output", "No space left on device"


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def run(code: str, *arguments: str, stdout: int, closed: tuple[int, ...] = ()) -> tuple[int, str]:
    """Status and stderr of an interpreter with this output."""
    words = [sys.executable, "-c", f"import sys\nfrom nemo_kto.telemetry import console\n{code}", *arguments]
    close = lambda: [os.close(number) for number in closed]  # noqa: E731
    env = {**os.environ, "PYTHONPATH": fork_server.search_path(REPOSITORY)}
    done = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, preexec_fn=close, env=env, text=True, check=False)
    os.close(stdout)
    return done.returncode, done.stderr


PRINT = "console.protect()\nprint('x' * size)\nprint('done', file=sys.stderr)"


@pytest.mark.parametrize("stdout", [closed_pipe, full])
def test_a_command_with_closed_output_keeps_its_status(stdout: Callable[[], int]) -> None:
    status, errors = run(f"size = 10**6\n{PRINT}", stdout=stdout())
    assert status == 0
    *lost, done = sorted(errors.splitlines(), reverse=True)
    assert (done, len(lost)) == ("done", stdout is full)
    for line in lost:
        assert_names(line, *FULL)


def test_closed_output_and_errors() -> None:
    """A file that is opened later must not get their numbers."""
    code = "console.protect()\nprint('x' * 10**6)\nprint('x', file=sys.stderr)\nfile = open('/dev/null')\n"
    code += "sys.exit(file.fileno())"
    assert run(code, stdout=full(), closed=(0, 1, 2)) == (3, "")


@pytest.mark.parametrize(
    ("stdout", "ends", "expected"),
    [(full, "pass", 1), (full, "sys.exit(2)", 2), (closed_pipe, "pass", 0)],
)
def test_the_status_of_a_command_whose_output_is_its_result(stdout: Callable[[], int], ends: str, expected: int) -> None:
    status, errors = run(
        f"console.protect()\nwith console.exit_if_output_lost():\n    print('found')\n    {ends}", stdout=stdout()
    )
    assert status == expected
    if stdout is full:
        assert_names(errors, *FULL)
    else:
        assert errors == ""


def test_unencodable_characters_are_escaped() -> None:
    read, write = os.pipe()
    code = "sys.stdout.reconfigure(encoding='ascii')\nconsole.protect()\nprint('\\u00e9 \\udcff')"
    assert run(code, stdout=write) == (0, "")
    assert os.read(read, 100) == b"\\xe9 \\udcff\n"
    os.close(read)
