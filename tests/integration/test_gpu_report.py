"""`make gpu` without a GPU: its environment, its lines and the page drawn from them; tests/gpu/test_report.py runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_report, gpu_tables, gpu_versions
from benchmarks.gpu_lines import END, HEADER, Lines, newest_of
from tests.conftest import REPOSITORY, load_script
from tests.helpers.commands import is_alive
from tests.integration.test_wheel import pins

NO_GPU = (
    "make gpu: this machine must have an NVIDIA GPU and its driver, got none that the driver library (libcuda.so.1) finds; "
    "run it on one, in a container with --gpus all (docs/gpu/README.md)"
)
without_gpu = pytest.mark.skipif(gpu_versions.gpu_count() > 0, reason="there is a GPU")


@without_gpu
def test_without_a_gpu_the_report_explains_and_writes_nothing(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'environment'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == NO_GPU
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def lines_of(file: Path, key: str, *measurements: tuple[str, str, dict[str, Any]]) -> Lines:
    lines = Lines(file=file, key=key)
    for measurement in measurements:
        lines.append(*measurement)
    return lines


def test_a_measurement_is_made_again_only_after_an_error_or_a_change(tmp_path: Path) -> None:
    calls = list[str]()

    def measurement() -> dict[str, int]:
        calls.append("called")
        if len(calls) == 1:
            raise RuntimeError("out of memory\nand more")
        return {"ms": len(calls)}

    file = tmp_path / "lines.jsonl"
    for key in ("a", "a", "a", "b"):
        Lines(file=file, key=key).measure("kernels", "attention", measurement)
    assert [json.loads(line)["found"] for line in file.read_text().splitlines()] == [
        {"error": "RuntimeError: out of memory"},
        {"ms": 2},
        {"ms": 3},
    ]
    assert Lines(file=file, key="a").of("kernels") == {"attention": {"ms": 2}}


def test_a_torn_line_is_lost_alone(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines = lines_of(file, "a", ("machine", "one", {"ms": 1}), ("machine", "two", {"ms": 2}))
    file.write_bytes(file.read_bytes()[:-9])
    assert lines.of("machine") == {"one": {"ms": 1}}
    lines.append("machine", "three", {"ms": 3})
    assert lines.of("machine") == {"one": {"ms": 1}, "three": {"ms": 3}}


STEP = {"seconds": 2.0, "tokens per second": 1234.5, "MFU": 0.4, "peak GB": 45.0, "planned GB": 46.0, "losses": [0.5, 0.25]}


def test_the_page_shows_each_step_with_its_newest_sources(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    machine = ("machine", "copies", {"GB/s": {"up": 54.8}})
    phases = {"reference": 0.5, "reference_swap": 0.3, "forward_backward": 1.0}
    lines_of(
        file,
        "a",
        (HEADER, HEADER, {"device": "1 x H100", "sources": "old"}),
        machine,
        ("machine", END, {"status": 0, "seconds": 9}),
    )
    lines_of(file, "a", ("llama-1b", "cached", {**STEP, "tokens per second": 1.0}))
    new = (HEADER, HEADER, {"device": "1 x H100", "sources": "new"})
    profile = {
        "busy ms": 900.0,
        "idle ms": 100.0,
        "longest gaps ms": [60.0],
        "kernels": 77,
        "largest": {"gemm": {"ms": 5.0, "calls": 3}},
    }
    lines_of(file, "b", new, ("llama-1b", "swap", {**STEP, "phases": phases, "profile": profile}))
    lines_of(file, "b", ("llama-1b", "cached", {"error": "OutOfMemoryError: 80 GB"}), ("trl", "8 rows", STEP))
    lines_of(file, "b", ("tests", "tests/gpu/test_x.py::test_y", {"result": "**failure**: a / b", "seconds": 1.5}))
    text = gpu_tables.page(file)
    assert "| sources | machine: old; llama-1b: new; trl: new; tests: new |" in text
    assert "| copies | GB/s up 54.8 |" in text
    shares = "0.0% | 10.0% | 15.0% | 0.0% | 50.0% | 0.0% | 25.0%"
    assert f"| swap | 1,234 | 2.000 | 40.0% | 45.0 (46.0) | 0.5000, 0.2500 | {shares} |" in text
    assert "77 kernels and copies; the device is idle in 10.0% of 1000 ms; longest gaps 60.0 ms." in text
    assert "| cached | **OutOfMemoryError: 80 GB** |" in text
    assert "| 8 rows | 1,234 | 2.000 | 40.0% | 45.0 (46.0) | 0.5000, 0.2500 |\n" in text.split("## TRL")[1]
    assert "| **failure**: a / b | test_x.py::test_y |" in text
    assert text.count("Not run: `make gpu STEP=") == 2
    assert text.count("Stopped before its end: `make gpu STEP=") == 3  # without a last line
    assert "1.0 |" not in text
    newest = newest_of(file, "llama-1b")
    assert newest is not None
    assert gpu_tables.failures(newest, ("llama-1b", "tests")) == [
        "llama-1b, cached: OutOfMemoryError: 80 GB",
        "llama-1b: not run; the same command continues",
        "tests/gpu/test_x.py::test_y: **failure**: a / b",
    ]


TESTS = """
import pathlib, time, pytest
seen = pathlib.Path(__file__).with_name("seen")

@pytest.mark.parametrize("number", range(3))
def test_quick(number):
    with seen.open("a") as file: file.write(f"{number}\\n")
    assert number != 1, "one | is\\nwrong"

def test_skipped():
    pytest.skip("no second GPU")

def test_bf16():
    with seen.open("a") as file: file.write("bf16\\n")
    if not (marker := seen.with_name("ended")).exists():
        marker.touch()
        time.sleep(600)
"""


@pytest.mark.full
def test_tests_that_have_passed_are_not_run_again(tmp_path: Path) -> None:
    """Those of bf16 come first. The first run is killed in one of them."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").touch()
    file = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_tests"]
    command += ["--lines", str(file), "--key", "a", "--rootdir", str(tmp_path), "--confcutdir", str(tmp_path)]
    command += [str(tmp_path / "test_it.py")]
    first = subprocess.Popen([*command, "-n", "1"], cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True)
    while not (tmp_path / "ended").exists() and first.poll() is None:
        time.sleep(0.1)
    gpu_report.interrupt(first)
    assert not file.exists()
    for _ in range(2):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout
    found = {name.split("::")[1]: each["result"] for name, each in Lines(file=file, key="a").of("tests").items()}
    wrong = "**failure**: AssertionError: one / is wrong assert 1 != 1"
    quick = {f"test_quick[{number}]": wrong if number == 1 else "passed" for number in range(3)}
    assert found == {"test_bf16": "passed", "test_skipped": "skipped: no second GPU", **quick}
    assert (tmp_path / "seen").read_text().split() == ["bf16", "bf16", "0", "1", "2", "1"]


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
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.parametrize(("changed", "same"), [("commit", True), ("sources", False), ("torch", False), ("device", False)])
def test_results_are_reused_for_the_same_sources_and_versions(changed: str, same: bool) -> None:
    now = {"device": "CPU", "torch": "2.11", "sources": "a", "commit": "b"}
    assert (gpu_report.key_of(now) == gpu_report.key_of(now | {changed: "another"})) is same


def test_pins_contain_the_imported_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's own copy is used, not one of an outer environment, which it hides: pip could not install both."""
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [pin for pin in gpu_versions.pins() if pin.startswith("torch==")] == ["torch==9.9"]


gpu_wheels = load_script("benchmarks/gpu_wheels.py")


def test_the_wheels_exclude_torch_and_transformers_with_their_dependencies() -> None:
    """Requirements of a carried package are carried too, or installed on the machine."""
    needed = {gpu_wheels.normal(name) for name in gpu_wheels.NEEDED.split()}
    present = {gpu_wheels.normal(name) for name in gpu_wheels.PRESENT.split()}
    assert not needed & present
    missing, seen = set(), 0
    for name in needed:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate({"extra": ""})]
        seen += len(found)
        missing |= {f"{name} requires {each.name}" for each in found if gpu_wheels.normal(each.name) not in needed | present}
    assert not missing
    assert seen > 30
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {gpu_wheels.normal(Requirement(line).name) for line in project["dependencies"]}
    assert required - needed - present == {"matplotlib", "tensorboard"}, "runs there write no event files and no reports"


def test_every_environment_takes_megatron_core_from_the_constraints_of_its_python() -> None:
    """CI and `make gpu` by these files, the image by ``--pins``; the version is written nowhere else."""
    installed = gpu_versions.version_of("megatron-core")
    for file in ("constraints.txt", "constraints-py312.txt"):
        version = pins(REPOSITORY / file)["megatron-core"]
        found = [line for line in gpu_versions.pins((REPOSITORY / file).read_text()) if line.startswith("megatron-core")]
        assert found == [f"megatron-core=={version}"], f"whatever is installed, here {installed}"
    programs = ["Makefile", "Dockerfile", *(f".ci/{file.name}" for file in (REPOSITORY / ".ci").iterdir())]
    texts = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in programs}
    assert [name for name, text in texts.items() if re.search(r"megatron[-_]core\s*[=<>~]=?\s*\d", text)] == []
    assert "gpu_versions.py --pins >" in texts["Dockerfile"]
    assert "gpu_versions.py --pins >" in texts[".ci/gpu-environment"]
    assert "constraints-py312.txt" not in texts["Dockerfile"].split("RUN", 1)[1]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-py312.txt"])
def test_transformer_engine_has_one_version(file: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = map(Requirement, project["optional-dependencies"]["gpu"])
    assert (needed.name, str(needed.specifier)) == ("transformer-engine", "==2.20.*")
    assert pins(REPOSITORY / file)["transformer-engine"] in needed.specifier
