"""Pytest plugin of `make gpu`: a line for each test when it ends, and no test again that has passed.

    python -m pytest -p benchmarks.gpu_tests --lines FILE --key KEY -n 4 tests/gpu

A run that is stopped loses only the tests that it is in. Tests of bf16 kernels come first.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.gpu_lines import Lines

STEP = "tests"
FIRST = ("test_layers", "bf16")  # in the names of tests that no other machine runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lines", type=Path, required=True, help="file of earlier results, to which those of this run are added"
    )
    parser.addoption("--key", required=True, help="of these sources and versions; results with another one do not count")


def pytest_configure(config: pytest.Config) -> None:
    lines = Lines(file=config.getoption("--lines"), key=config.getoption("--key"))
    config.pluginmanager.register(Results(lines, writes=not hasattr(config, "workerinput")))


class Results:
    """Results of tests as lines, written by the process that started the workers."""

    def __init__(self, lines: Lines, *, writes: bool) -> None:
        self.lines, self.writes = lines, writes
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = {name for name, found in self.lines.of(STEP).items() if is_final(found["result"])}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
        items[:] = [item for item in items if item.nodeid not in known]
        items.sort(key=lambda item: not any(word in item.nodeid for word in FIRST))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for setup, call and teardown; the first that has not passed is the result."""
        if not self.writes:
            return
        reports = self.reports[report.nodeid]
        reports.append(report)
        if report.when == "teardown":
            result = next((describe(each) for each in reports if not each.passed), "passed")
            seconds = sum(each.duration for each in reports)
            self.lines.append(STEP, report.nodeid, {"result": result, "seconds": round(seconds, 1)})


def is_final(result: str) -> bool:
    """Return whether a test need not run again."""
    return result.startswith(("passed", "skipped"))


def describe(report: pytest.TestReport) -> str:
    """Return a failure or a skipped test as a cell of a Markdown table."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    text = " ".join(text.removeprefix("Skipped: ").split())[:400].replace("|", "/")
    if report.skipped:
        return f"skipped: {text}"
    return f"**{'failure' if report.when == 'call' else 'error'}**: {text}"
