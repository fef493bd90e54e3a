"""Logging by rank, and closed, full and unread standard output."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.telemetry.console import set_up_logging
from tests.helpers import fork_server
from tests.helpers.messages import assert_names


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def say_all(stream: io.StringIO, *, rank: int) -> list[str]:
    """The lines of a rank that prints everything, with logging set up twice."""
    for _ in range(2):
        set_up_logging(rank=rank, stream=stream)
    for name in ("nemo_kto.run.train", "nemo_kto.data.batches.dataset", "some_library"):
        logger = logging.getLogger(name)
        logger.info("%s tells", name)
        logger.warning("%s warns", name)
        logger.warning("%s warns", name)
    logging.getLogger("nemo_kto.data.batches.dataset").error("broken")
    with warnings.catch_warnings():
        warnings.simplefilter("always", FutureWarning)
        warnings.warn_explicit("old", FutureWarning, "library.py", 7)
    return stream.getvalue().splitlines()


def test_rank_zero_logs_and_warns() -> None:
    assert say_all(io.StringIO(), rank=0) == [
        "nemo_kto.run.train tells",
        "warning: nemo_kto.run.train warns",
        "nemo_kto.data.batches.dataset tells",
        "warning: nemo_kto.data.batches.dataset warns",
        "warning: some_library warns",
        "error: broken",
        "warning: old (FutureWarning, library.py:7)",
    ]


def test_other_ranks_log_only_their_warnings() -> None:
    assert say_all(io.StringIO(), rank=3) == [
        "warning on rank 3: nemo_kto.run.train warns",
        "warning on rank 3: some_library warns",
        "error on rank 3: broken",
        "warning on rank 3: old (FutureWarning, library.py:7)",
    ]


def test_colour_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[33mwarning:\x1b[0m some_library warns" in say_all(Terminal(), rank=0)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "warning: some_library warns" in say_all(Terminal(), rank=0)


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
    ("stdout", "ends", "expected"), [(full, "pass", 1), (full, "sys.exit(2)", 2), (closed_pipe, "pass", 0)]
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
