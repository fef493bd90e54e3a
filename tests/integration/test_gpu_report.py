"""`make gpu` where there is no GPU, and the page that it writes where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import REPOSITORY, load_script
from tests.messages import assert_names

gpu_report = load_script("benchmarks/gpu_report.py")
NO_GPU = (
    "make gpu: this machine must have an NVIDIA GPU and its driver, got none that the driver library (libcuda.so.1) finds; "
    "run it on one, in a container with --gpus all (docs/gpu/README.md)"
)
without_gpu = pytest.mark.skipif(gpu_report.gpu_count() > 0, reason="there is a GPU")


@without_gpu
def test_without_a_gpu_it_says_what_it_needs_and_makes_nothing(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'environment'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == NO_GPU
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@without_gpu
@pytest.mark.full  # two minutes of processes of their own
def test_the_page(tmp_path: Path) -> None:
    """Everything that `make gpu` runs after installing, a sample of it, on the CPU."""
    page = tmp_path / "page.md"
    command = [sys.executable, "benchmarks/gpu_report.py", "--toy", "--page", str(page)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "| test_a_run_is_that_of_the_cpu[tokens] | passed | " in text
    assert "| test_a_swap_there_and_back_is_exact | skipped: " in text
    assert_names(text, "PASSED", "tests/gpu", "0")
    assert "| nemo_kto, swap | " in text
    assert_names(text, "PASSED", "benchmarks/gpu.py", "0")
    assert f"| Python | {sys.version.split()[0]} |" in text


def test_pins_are_what_was_compiled_with_torch() -> None:
    names = [pin.split("==")[0].lower() for pin in gpu_report.pins()]
    assert "torch" in names
    assert not {"numpy", "transformers", "megatron-core"} & set(names)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("1 x NVIDIA H200, 151 GB", "nvidia-h200"),
        ("8 x NVIDIA A100-SXM4-80GB, 85 GB", "nvidia-a100-sxm4-80gb"),
        ("CPU", "cpu"),
    ],
)
def test_the_name_of_the_page(device: str, name: str) -> None:
    assert gpu_report.slug(device) == name


def test_results_of_tests_are_told() -> None:
    outcomes = ("", "<failure message='a | b&#10; c'/>", "<skipped message='no'/>")
    cases = ElementTree.fromstring("".join(["<s>", *(f"<testcase>{one}</testcase>" for one in outcomes), "</s>"]))
    assert [gpu_report._result(case) for case in cases] == ["passed", "**failure**: a / b c", "skipped: no"]
