"""`make gpu` without a GPU, and the page that it writes with one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, load_script
from tests.helpers.messages import assert_names

gpu_report = load_script("benchmarks/gpu_report.py")
NO_GPU = (
    "make gpu: this machine must have an NVIDIA GPU and its driver, got none that the driver library (libcuda.so.1) finds; "
    "run it on one, in a container with --gpus all (docs/gpu/README.md)"
)
without_gpu = pytest.mark.skipif(gpu_report.gpu_count() > 0, reason="there is a GPU")


@without_gpu
def test_without_a_gpu_the_report_explains_and_writes_nothing(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'environment'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == NO_GPU
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@without_gpu
@pytest.mark.full  # two minutes of separate processes
def test_the_report_page(tmp_path: Path) -> None:
    """Everything that `make gpu` runs after installing, a sample of it, on the CPU, in two parts."""
    for part in ("tests", "llama-1b"):
        command = [sys.executable, "benchmarks/gpu_report.py", "--toy", "--part", part, "--folder", str(tmp_path)]
        done = subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ}, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr
    text = (tmp_path / "cpu.md").read_text()
    assert "| test_jobs.py::test_a_run_equals_the_cpu[tokens] | passed | " in text
    assert "| test_swap.py::test_a_swap_and_its_reverse_are_exact | skipped: " in text
    assert "PASSED: tests/gpu: 1 passed, 0 failed, 1 skipped." in text
    assert "| nemo_kto, swap | " in text
    assert_names(text, "PASSED", "benchmarks/gpu.py", "0")
    assert "Not run: `make gpu PART=qwen-7b`." in text
    assert f"| Python | {sys.version.split()[0]} |" in text


def part_of(verdict: str, **versions: str) -> dict[str, Any]:
    return {"date": "2026-01-02", "versions": {"device": "CPU", **versions}, "lines": ["| 1 |"], "verdict": verdict}


def test_a_page_names_the_versions_of_each_part_where_they_differ() -> None:
    tests, benchmark = (part_of(f"PASSED: {name}", torch="2.11", sources=name) for name in "ab")
    text = gpu_report.page({"qwen-7b": benchmark, "tests": tests})
    assert "| torch | 2.11 |" in text
    assert "| sources | tests: a; qwen-7b: b |" in text
    places = [text.index(part) for part in ("## Tests", "PASSED: a", "## llama-1b", "Not run: ", "## qwen-7b", "PASSED: b")]
    assert places == sorted(places)


def test_a_part_keeps_the_measurements_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark itself is replaced, which takes minutes; test_the_report_page runs it."""
    file = tmp_path / "cpu.json"
    first = part_of("PASSED: tests/gpu: 7 passed, 0 failed, 0 skipped.", sources="then") | {"cases": {}}
    file.write_text(json.dumps({"tests": first}))
    monkeypatch.setattr(gpu_report, "versions", lambda _: {"device": "CPU", "sources": "now"})
    asked = []

    def run_benchmark(size: str, **options: Any) -> dict[str, Any]:
        asked.append((size, options["minutes"]))
        return {"lines": ["| 1234 tokens |"], "figures": {size: {"runs": 1}}, "verdict": "PASSED: gpu.py"}

    monkeypatch.setattr(gpu_report, "run_benchmark", run_benchmark)
    for minutes, name in ((None, "llama-1b"), (2.5, "qwen-7b")):
        arguments = argparse.Namespace(trl_python=sys.executable, minutes=minutes, toy=False)
        assert gpu_report.run_part(name, file, arguments) == "PASSED: gpu.py"
    assert asked == [("llama-1b", 7.0), ("qwen-7b", 2.5)]
    found = json.loads(file.read_text())
    assert found["tests"] == first
    assert found["qwen-7b"]["figures"] == {"qwen-7b": {"runs": 1}}
    text = (tmp_path / "cpu.md").read_text()
    assert (text.count("| 1234 tokens |"), text.count("7 passed")) == (2, 1)
    assert "| sources | tests: then; llama-1b: now; qwen-7b: now |" in text


TESTS = """
import pathlib, time, pytest
seen = pathlib.Path(__file__).with_name("seen")

@pytest.mark.parametrize("number", range(3))
def test_quick(number):
    with seen.open("a") as file: file.write(f"{number}\\n")
    assert number != 1, "one | is\\nwrong"

def test_skipped():
    pytest.skip("no second GPU")

def test_long():
    if not (marker := seen.with_name("ended")).exists():
        marker.touch()
        time.sleep(60)

def test_last():
    pass
"""


def results_of(file: Path) -> dict[str, str]:
    cases = json.loads(file.read_text())["tests"]["cases"]
    return {name.split("::")[1]: case["result"] for name, case in cases.items()}


@pytest.mark.full
def test_tests_that_have_passed_are_not_run_again(tmp_path: Path) -> None:
    """The first run is interrupted in a long test; the second begins with the rest and repeats the failures.

    A shell that runs `make gpu` in the background has it ignore SIGINT.
    """
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").touch()
    file = tmp_path / "device.json"
    file.write_text(json.dumps({"llama-1b": {"verdict": "kept"}, "tests": {"cases": {}}}))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_tests"]
    command += [
        "--results",
        str(file),
        "--rootdir",
        str(tmp_path),
        "--confcutdir",
        str(tmp_path),
        str(tmp_path / "test_it.py"),
    ]
    first = subprocess.Popen(
        ["env", "--ignore-signal=INT", *command], cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True
    )
    while not (tmp_path / "ended").exists() and first.poll() is None:
        time.sleep(0.1)
    gpu_report.interrupt(first)
    assert first.returncode == 2
    wrong = "**failure**: AssertionError: one / is wrong assert 1 != 1"
    found = {f"test_quick[{number}]": wrong if number == 1 else "passed" for number in range(3)}
    found |= {"test_skipped": "skipped: no second GPU", "test_long": "**did not end**", "test_last": "not run"}
    assert results_of(file) == found
    cases = json.loads(file.read_text())["tests"]["cases"]
    verdict = gpu_report.tests_verdict(cases, ended=True)
    assert_names(verdict, "UNFINISHED", "2 passed", "2 failed", "1 skipped", "1 not run")

    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert results_of(file) == found | {"test_long": "passed", "test_last": "passed"}
    assert (tmp_path / "seen").read_text().split() == ["0", "1", "2", "1"]
    found_parts = json.loads(file.read_text())
    assert found_parts["llama-1b"] == {"verdict": "kept"}
    assert_names(gpu_report.tests_verdict(found_parts["tests"]["cases"], ended=True), "FAILED", "4 passed", "1 failed")


@pytest.mark.parametrize(
    ("results", "ended", "words"),
    [
        (["passed", "skipped: no"], True, ("PASSED", "1 passed, 0 failed, 1 skipped")),
        (["passed", "**error**: no"], True, ("FAILED", "1 passed, 1 failed, 0 skipped")),
        (["passed"], False, ("FAILED", "1 passed, 0 failed, 0 skipped")),
        ([], True, ("FAILED", "0 passed, 0 failed, 0 skipped")),
        (["passed", "not run"], True, ("UNFINISHED", "1 not run", "PART=tests")),
    ],
)
def test_the_verdicts_of_parts(results: list[str], ended: bool, words: tuple[str, ...]) -> None:
    cases = {str(number): {"result": result} for number, result in enumerate(results)}
    assert_names(gpu_report.tests_verdict(cases, ended=ended), *words)


def test_an_interrupted_process_ends_its_children(tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(3));"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    gpu_report.interrupt(process)
    assert process.returncode == 3
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("changed", "same"), [("commit", True), ("sources", False), ("torch", False), ("device", False)])
def test_results_are_reused_for_the_same_sources_and_versions(changed: str, same: bool) -> None:
    now = {"device": "CPU", "torch": "2.11", "sources": "a", "commit": "b"}
    assert gpu_report.is_comparable(now, now | {changed: "another"}) is same
    assert not gpu_report.is_comparable({}, now)


def test_pins_contain_the_imported_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's own copy is used, not one of an outer environment, which it hides: pip could not install both."""
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [pin for pin in gpu_report.pins() if pin.startswith("torch==")] == ["torch==9.9"]
