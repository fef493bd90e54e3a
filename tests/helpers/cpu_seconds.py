"""CPU seconds of each file of tests, with all processes that its tests start: ``pytest -p tests.helpers.cpu_seconds``.

Unlike durations they hardly depend on other work of the machine. A fixture of several files counts for the first of them.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

COLLECTION = "(imports and collection)"
_SHOWN = 40  # files
_seconds: Any = Counter()  # typed for integers only


def used(process: int) -> float:
    """CPU seconds of a process, its ended children, and its descendants."""
    seconds = 0.0
    with contextlib.suppress(OSError):  # it has ended
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                seconds += sum(used(int(child)) for child in (thread / "children").read_text().split())
    return seconds


def _count(name: str) -> None:
    _seconds[name] += used(os.getpid()) - _seconds.total()


def pytest_collection_finish() -> None:
    _count(COLLECTION)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    _count(item.nodeid.partition("::")[0])
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # of a worker of xdist
    if output is not None:
        output["cpu_seconds"] = dict(_seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"{_seconds.total():.0f} CPU seconds")
    for name, seconds in _seconds.most_common(_SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")
