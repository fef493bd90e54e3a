"""Pytest plugin: writes each result when the test ends, and leaves out tests whose results it has.

    python -m pytest -p benchmarks.gpu_tests --results FILE tests/gpu

FILE is the JSON of benchmarks/gpu_report.py; in ``["tests"]["cases"]`` are the result and the seconds of each node id. A run
that is interrupted loses only the test that it is in. The next run begins with the tests that have not run; failed ones, and
those that did not end, run again after them.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

NOT_RUN = "not run"
DID_NOT_END = "**did not end**"


def is_final(case: dict[str, Any]) -> bool:
    """Whether a result is kept: passed or skipped."""
    return bool(case["result"].startswith(("passed", "skipped")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True, help="JSON file to read earlier results from and to update")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
    config.pluginmanager.register(Results(config.getoption("--results")))


class Results:
    """The results of all runs; ``file`` is replaced after each test."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.parts = json.loads(file.read_text())
        self.cases: dict[str, dict[str, Any]] = self.parts["tests"]["cases"]

    def note(self, nodeid: str, result: str, seconds: float) -> None:
        self.cases[nodeid] = {"result": result, "seconds": round(seconds, 1)}
        new = self.file.with_name(f"{self.file.name}.new")
        new.write_text(json.dumps(self.parts, indent=1))
        new.replace(self.file)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid not in self.cases:
                self.note(item.nodeid, NOT_RUN, 0.0)
        config.hook.pytest_deselected(items=[item for item in items if is_final(self.cases[item.nodeid])])
        items[:] = [item for item in items if not is_final(self.cases[item.nodeid])]
        items.sort(key=lambda item: self.cases[item.nodeid]["result"] != NOT_RUN)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(nodeid, DID_NOT_END, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Three for each test: setup, call, teardown. The first that has not passed is the result."""
        before = self.cases[report.nodeid]
        seconds = before["seconds"] + report.duration
        if before["result"] not in (DID_NOT_END, "passed"):
            self.note(report.nodeid, before["result"], seconds)
        elif report.passed:
            self.note(report.nodeid, "passed" if report.when != "setup" else DID_NOT_END, seconds)
        else:
            self.note(report.nodeid, describe(report), seconds)


def describe(report: pytest.TestReport) -> str:
    """A failure or a skipped test as a cell of a Markdown table."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    text = " ".join(text.removeprefix("Skipped: ").split())[:200].replace("|", "/")
    if report.skipped:
        return f"skipped: {text}"
    return f"**{'failure' if report.when == 'call' else 'error'}**: {text}"
