"""What `make gpu` runs: tests/gpu and benchmarks/gpu.py, and a page of what they found, docs/gpu/DEVICE.md.

    python benchmarks/gpu_report.py [--trl-python PYTHON] [--minutes 14]
    python benchmarks/gpu_report.py --check    status 2 and a message where there is no GPU; any Python 3 will do
    python benchmarks/gpu_report.py --pins [CONSTRAINTS]    constraints for pip: what is installed and compiled against this
                                               interpreter's torch, and the file's versions of what is not installed
    python benchmarks/gpu_report.py --toy --page FILE    a sample on the CPU too: a test of this program

The interpreter needs this repository's test packages. Where something is missing (TRL, Transformer Engine, a second GPU),
the page says so. It is written even if tests or runs fail; then the status is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
USAGE_ERROR = 2
NO_GPU = (
    "make gpu: this machine must have an NVIDIA GPU and its driver, got none that the driver library (libcuda.so.1) finds; "
    "run it on one, in a container with --gpus all (docs/gpu/README.md)"
)
TEST_SECONDS = 600
# Compiled against torch, or by it.
_WITH_TORCH = ("torch", "triton", "pytorch-triton", "transformer-engine", "transformer_engine", "flash", "apex", "nvidia")
_PACKAGES = (
    "transformer_engine",
    "apex",
    "flash_attn",
    "liger_kernel",
    "megatron-core",
    "transformers",
    "pytorch-lightning",
)


def gpu_count() -> int:
    """GPUs that the driver finds, asked without torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def pins(constraints: str = "") -> list[str]:
    """Constraints that make pip fail instead of replacing torch and what was compiled with it.

    Args:
        constraints: versions, line by line. They hold for packages that are not installed, and for megatron-core: the others
            stay as they are if they can.
    """
    found = {(package.metadata["Name"], package.version) for package in metadata.distributions()}
    kept = [f"{name}=={version}" for name, version in sorted(found) if name and name.lower().startswith(_WITH_TORCH)]
    stay = {_normal(name) for name, _ in found if name} - {"megatron-core"}
    return kept + [
        line for line in constraints.splitlines() if line[:1].isalnum() and _normal(line.split("==")[0]) not in stay
    ]


def _normal(name: str) -> str:
    """The name of a package as indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_of(package: str) -> str:
    """Of a package of this interpreter."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def output_of(*command: str) -> str | None:
    """What a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions(trl_python: str) -> dict[str, str]:
    """Of what the figures depend on."""
    import torch

    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    cudnn, nccl = torch.backends.cudnn.version(), torch.cuda.nccl.version() if device else None
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    trl = output_of(trl_python, "-c", "from importlib.metadata import version; print(version('trl'))")
    return {
        "device": f"{torch.cuda.device_count()} x {device.name}, {device.total_memory / 1e9:.0f} GB" if device else "CPU",
        "processors": f"{len(os.sched_getaffinity(0))}, {platform.machine()}",
        "driver": (driver or "not known").splitlines()[0],
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(cudnn),
        "NCCL": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl),
        **{package: version_of(package) for package in _PACKAGES},
        "TRL": trl or "not installed",
        "commit": output_of("git", "rev-parse", "--short=12", "HEAD") or "not known",
    }


def run_tests(report: Path, *, toy: bool) -> list[str]:
    """tests/gpu; the results as a Markdown table, and a last line that begins with PASSED or FAILED."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", f"--junitxml={report}", "-o", "junit_logging=no"]
    command += ["-k", "tokens or exact"] if toy else ["--matrix=full"]
    began = time.monotonic()
    tests = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        status = tests.wait(TEST_SECONDS)
        ended = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        status, ended = 1, f"did not end within {TEST_SECONDS} s"
        tests.send_signal(signal.SIGINT)  # after which it writes what it has
        tests.wait()
    lines = ["| test | result | s |", "|---|---|---|"]
    if report.exists():  # pytest writes it at its end
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            lines.append(f"| {case.get('name')} | {_result(case)} | {float(case.get('time', 0)):.1f} |")
    verdict = "FAILED" if status else "PASSED"
    return [*lines, "", f"{verdict}: tests/gpu {ended}, after {time.monotonic() - began:.0f} s."]


def _result(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            text = " ".join(found.get("message", "").split())[:200].replace("|", "/")
            return f"**{kind}**: {text}" if kind != "skipped" else f"skipped: {text}"
    return "passed"


def run_benchmarks(tables: Path, arguments: argparse.Namespace) -> list[str]:
    """benchmarks/gpu.py; its tables, and a last line that begins with PASSED or FAILED."""
    options = ["--minutes", str(arguments.minutes), "--trl-python", arguments.trl_python, "--result", str(tables)]
    options += ["--result", str(tables.with_suffix(".json"))]
    options += ["--toy", "--steps", "1", "--size", "llama-1b", "--only", "nemo_kto, swap"] if arguments.toy else []
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu.py"), *options]
    status = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=False).returncode
    text = tables.read_text().splitlines() if tables.exists() else []
    return [*text, f"{'FAILED' if status else 'PASSED'}: benchmarks/gpu.py ended with status {status}."]


def page(found: dict[str, str], tests: list[str], figures: list[str]) -> str:
    """The page of a device."""
    rows = [f"| {name} | {value} |" for name, value in found.items()]
    return "\n".join(
        [
            f"# {found['device']}",
            "",
            f"Written by `make gpu` on {time.strftime('%Y-%m-%d')}; [README.md](README.md) says what it runs.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            "## Tests",
            "",
            *tests,
            "",
            "## Figures",
            "",
            *figures,
            "",
        ]
    )


def slug(device: str) -> str:
    """A device's name as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", device.split(" x ")[-1].split(",")[0].lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--pins", nargs="?", const=os.devnull, type=Path, metavar="CONSTRAINTS")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter that has the TRL to compare with")
    parser.add_argument("--minutes", type=float, default=14.0, help="for the benchmarks; the tests take up to 10 more")
    parser.add_argument("--page", type=Path, help="file to write; by default docs/gpu/DEVICE.md")
    arguments = parser.parse_args()
    if arguments.pins is not None:
        print("\n".join(pins(arguments.pins.read_text())))
        return
    if not arguments.toy and not gpu_count():
        print(NO_GPU, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    if arguments.check:
        return
    import torch

    if not arguments.toy and not torch.cuda.is_available():
        built = f"torch {torch.__version__} of {sys.executable}, built for CUDA {torch.version.cuda}"
        print(f"make gpu: torch must be able to use the GPU, got {built}; install one for this driver", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    found = versions(arguments.trl_python)
    file = arguments.page or REPOSITORY / "docs" / "gpu" / f"{slug(found['device'])}.md"
    with tempfile.TemporaryDirectory() as folder:
        tests = run_tests(Path(folder) / "tests.xml", toy=arguments.toy)
        file.write_text(page(found, tests, ["Not measured: the benchmarks did not end."]))  # should they be interrupted
        figures = run_benchmarks(Path(folder) / "tables.md", arguments)
    file.write_text(page(found, tests, figures))
    print(f"\n{tests[-1]}\n{figures[-1]}\nwritten: {file}")
    sys.exit(any(lines[-1].startswith("FAILED") for lines in (tests, figures)))


if __name__ == "__main__":
    main()
