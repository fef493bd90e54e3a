"""The limit on open files is raised if possible, and reported if too low."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
from collections.abc import Callable
from typing import Any

from nemo_kto.errors import UserError
from nemo_kto.processes.ranks import MIN_FILES, explain_open_files, raise_open_files
from tests.helpers.messages import assert_names
from tests.unit.conftest import FindErrors


def limited(soft: int, hard: int, work: Callable[[], Any]) -> Any:
    """The result of ``work`` in a separate process with these limits."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for handle in map(int, os.listdir("/proc/self/fd")):  # earlier tests of this process may have left many
                if handle > 2 and handle != writer:
                    with contextlib.suppress(OSError):
                        os.close(handle)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as results:
        answer = results.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def test_a_too_low_limit_is_reported_before_the_start(find_errors: FindErrors) -> None:
    (mistake,) = limited(64, 64, find_errors)
    assert_names(mistake, "ulimit -n", f"at least {MIN_FILES}", "got 64", "ulimit -n 4096")
    assert limited(64, MIN_FILES, find_errors) == []


def test_the_limit_is_raised_to_the_hard_limit() -> None:
    def limits() -> tuple[int, int]:
        raise_open_files()
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert limited(100, 1000, limits) == [1000, 1000]
    assert limited(1000, 1000, limits) == [1000, 1000]


def test_too_few_open_files_are_a_user_error() -> None:
    def open_too_many() -> str:
        opened = []
        try:
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            for handle in opened:
                os.close(handle)
            found = explain_open_files(error)
        assert isinstance(found, UserError)
        return str(found)

    assert_names(limited(200, 200, open_too_many), "ulimit -n", "got 200", "Too many open files", "ulimit -n 4096")


def test_user_errors_are_found_by_their_cause() -> None:
    gloo = RuntimeError("enforce fail at device.cc:186. Too many open files")
    assert isinstance(explain_open_files(gloo), UserError)
    outer = ValueError("a checkpoint cannot be read")
    outer.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert isinstance(explain_open_files(outer), UserError)
    other = OSError(errno.ENOENT, "No such file")
    assert explain_open_files(other) is other


def test_a_cycle_of_causes_terminates() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__context__ = second, first
    assert explain_open_files(first) is first
