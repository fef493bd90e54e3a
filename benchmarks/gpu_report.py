"""What `make gpu` runs: tests/gpu and benchmarks/gpu.py, and a page of what they found, docs/gpu/DEVICE.md.

    python benchmarks/gpu_report.py [--part tests] [--part llama-1b] [--part qwen-7b] [--minutes M] [--trl-python PYTHON]
                                    [--folder FOLDER]
    python benchmarks/gpu_report.py --check    status 2 and a message where there is no GPU; any Python 3 will do
    python benchmarks/gpu_report.py --constraints    the file of tested versions for this interpreter's Python
    python benchmarks/gpu_report.py --pins [FILE]    constraints for pip: what is installed and compiled against this
                                                     interpreter's torch, and that file's versions of what is not installed
    python benchmarks/gpu_report.py --toy --folder FOLDER    a sample on the CPU too: a test of this program

Each part ends within its minutes, and parts may be separate commands: all results are in FOLDER/DEVICE.json, from which
FOLDER/DEVICE.md is written after each part. Tests that have passed with the same sources and versions do not run again.

The interpreter needs this repository's test packages. Where something is missing (TRL, Transformer Engine, a second GPU),
the page says so. It is written even if tests or runs fail; then, and if tests are left, the status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
USAGE_ERROR = 2
NO_TESTS_LEFT = 5  # pytest's status where all tests were deselected
NO_GPU = (
    "make gpu: this machine must have an NVIDIA GPU and its driver, got none that the driver library (libcuda.so.1) finds; "
    "run it on one, in a container with --gpus all (docs/gpu/README.md)"
)
# Minutes of each part. With installing, and with the minute that it may take longer, each is below 10, and all are below 30.
PARTS = {"tests": 8.0, "llama-1b": 7.0, "qwen-7b": 7.0}
SOURCES = ("nemo_kto/**/*.py", "conf/**/*.yaml", "tests/**/*.py", "benchmarks/gpu*.py")
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


def tested_versions() -> Path:
    """The constraints that are tested with this interpreter's Python."""
    name = "constraints-py312.txt" if sys.version_info[:2] == (3, 12) else "constraints.txt"
    return next(folder / name for folder in (REPOSITORY, Path(__file__).parent) if (folder / name).exists())


def pins(constraints: str = "") -> list[str]:
    """Constraints that make pip fail instead of replacing torch and what was compiled with it.

    Args:
        constraints: versions, line by line. They hold for packages that are not installed, and for megatron-core: the others
            stay as they are if they can.
    """
    found: dict[str, str] = {}
    for package in metadata.distributions():  # in the order of the search path: the first is imported
        if name := package.metadata["Name"]:
            found.setdefault(name, package.version)
    kept = [f"{name}=={version}" for name, version in sorted(found.items()) if name.lower().startswith(_WITH_TORCH)]
    stay = {_normal(name) for name in found} - {"megatron-core"}
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


def unmet() -> list[str]:
    """Requirements of pyproject.toml that this interpreter's packages do not meet, as without a package index."""
    from packaging.requirements import Requirement

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    found = {each: version_of(each.name) for each in needed}
    return [
        f"{each} ({version})"
        for each, version in found.items()
        if version == "not installed" or not each.specifier.contains(version, prereleases=True)
    ]


def source_digest() -> str:
    """Of the files that the results depend on, not of this one, by their names and contents."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in SOURCES for file in REPOSITORY.glob(pattern)} - {Path(__file__).resolve()}):
        digest.update(f"{file.relative_to(REPOSITORY).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def device_name() -> str:
    """GPUs of this machine with their memory, or CPU."""
    import torch

    if not torch.cuda.is_available():
        return "CPU"
    device = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {device.name}, {device.total_memory / 1e9:.0f} GB"


def versions(trl_python: str) -> dict[str, str]:
    """Of what the figures depend on."""
    import torch

    cudnn, nccl = torch.backends.cudnn.version(), torch.cuda.nccl.version() if torch.cuda.is_available() else None
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    trl = output_of(trl_python, "-c", "from importlib.metadata import version; print(version('trl'))")
    return {
        "device": device_name(),
        "processors": f"{len(os.sched_getaffinity(0))}, {platform.machine()}",
        "driver": (driver or "not known").splitlines()[0],
        "Python": platform.python_version(),
        "headers of Python": "installed" if Path(sysconfig.get_path("include"), "Python.h").exists() else "not installed",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(cudnn),
        "NCCL": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl),
        **{package: version_of(package) for package in _PACKAGES},
        "TRL": trl or "not installed",
        "requirements not met": ", ".join(unmet()) or "none",
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "not known",
        "sources": source_digest(),
    }


def run_tests(file: Path, *, minutes: float, toy: bool) -> dict[str, Any]:
    """tests/gpu, except for the tests that have passed.

    Args:
        file: the results of all parts, in which benchmarks/gpu_tests.py updates those of the tests after each.
        minutes: after which the run is interrupted, within a test.
        toy: a sample.

    Returns:
        ``cases``: result and seconds of each test; ``lines``: the same as a Markdown table; ``verdict``: begins with PASSED,
        FAILED or UNFINISHED.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_tests", "--results", str(file.resolve())]
    command += ["tests/gpu", "--matrix=full", *(["-k", "tokens or exact"] if toy else [])]
    tests = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    try:
        ended = tests.wait(60 * minutes) in (0, 1, NO_TESTS_LEFT)
    except subprocess.TimeoutExpired:
        ended = True
        interrupt(tests)
    cases = json.loads(file.read_text())["tests"]["cases"]
    lines = ["| test | result | s |", "|---|---|---|"]
    for name, case in cases.items():
        lines.append(f"| {name.removeprefix('tests/gpu/')} | {case['result']} | {case['seconds']:.1f} |")
    return {"cases": cases, "lines": lines, "verdict": tests_verdict(cases, ended=ended)}


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started; it has a minute for its own end."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tests_verdict(cases: dict[str, dict[str, Any]], *, ended: bool) -> str:
    """A line on all results; ``ended`` is false where pytest itself failed, as at an import."""
    results = [case["result"] for case in cases.values()]
    counts = {name: sum(result.startswith(name) for result in results) for name in ("passed", "skipped", "not run")}
    failed = len(results) - sum(counts.values())
    said = f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped"
    if not ended or not results:
        return f"FAILED: tests/gpu could not run to its end; its output says why. {said}."
    if counts["not run"]:
        return f"UNFINISHED: tests/gpu: {said}, {counts['not run']} not run: `make gpu PART=tests` again."
    return f"{'FAILED' if failed else 'PASSED'}: tests/gpu: {said}."


def run_benchmark(size: str, *, minutes: float, trl_python: str, toy: bool) -> dict[str, Any]:
    """benchmarks/gpu.py with one model.

    Returns:
        ``lines``: its tables; ``figures``: all that it measured; ``verdict``: begins with PASSED or FAILED.
    """
    with tempfile.TemporaryDirectory() as folder:
        tables, figures = Path(folder) / "tables.md", Path(folder) / "figures.json"
        command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu.py"), "--size", size, "--minutes", str(minutes)]
        command += ["--trl-python", trl_python, "--result", str(tables), "--result", str(figures)]
        command += ["--toy", "--steps", "1", "--only", "nemo_kto, swap"] if toy else []
        status = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=False).returncode
        lines = tables.read_text().splitlines() if tables.exists() else ["Not measured: the benchmark did not end."]
        measured = json.loads(figures.read_text()) if figures.exists() else {}
    verdict = f"{'FAILED' if status else 'PASSED'}: benchmarks/gpu.py --size {size} ended with status {status}."
    return {"lines": lines, "figures": measured, "verdict": verdict}


def page(parts: dict[str, dict[str, Any]]) -> str:
    """The page of a device, from the results of its parts.

    Args:
        parts: by name; ``versions``, ``date``, ``lines`` and ``verdict`` of each.
    """
    known = {name: parts[name] for name in PARTS if name in parts}
    device = next(iter(known.values()))["versions"]["device"]
    dates = ", ".join(sorted({part["date"] for part in known.values()}))
    lines = [f"# {device}", "", f"Written by `make gpu` on {dates}; [README.md](README.md) says what it runs.", ""]
    lines += ["| | |", "|---|---|"]
    for row in next(iter(known.values()))["versions"]:
        values = {name: part["versions"].get(row, "not known") for name, part in known.items()}
        same = len(set(values.values())) == 1
        text = values.popitem()[1] if same else "; ".join(f"{name}: {value}" for name, value in values.items())
        lines.append(f"| {row} | {text} |")
    for name in PARTS:
        part = known.get(name, {"lines": [], "verdict": f"Not run: `make gpu PART={name}`."})
        lines += ["", f"## {'Tests' if name == 'tests' else name}", "", *part["lines"], "", part["verdict"]]
    return "\n".join(lines) + "\n"


def slug(device: str) -> str:
    """A device's name as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", device.split(" x ")[-1].split(",")[0].lower()).strip("-")


def is_comparable(earlier: dict[str, str], now: dict[str, str]) -> bool:
    """Whether tests that have passed need not run again: nothing has changed but the commit's name."""
    return {**earlier, "commit": ""} == {**now, "commit": ""}


def run_part(name: str, file: Path, arguments: argparse.Namespace) -> str:
    """Run a part, and write its results into ``file`` (JSON), beside those of the other parts, and the page.

    Returns:
        The verdict.
    """
    parts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    new: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "versions": versions(arguments.trl_python)}
    minutes = arguments.minutes or PARTS[name]
    if name == "tests":
        earlier = parts.get(name, {"versions": {}})
        cases = earlier["cases"] if is_comparable(earlier["versions"], new["versions"]) else {}
        parts[name] = {**new, "cases": cases, "lines": [], "verdict": "UNFINISHED: the tests were killed."}
        file.write_text(json.dumps(parts, indent=1) + "\n")
        result = run_tests(file, minutes=minutes, toy=arguments.toy)
    else:
        result = run_benchmark(name, minutes=minutes, trl_python=arguments.trl_python, toy=arguments.toy)
    parts[name] = {**new, **result}
    file.write_text(json.dumps(parts, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(parts))
    return str(result["verdict"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--constraints", action="store_true")
    parser.add_argument("--pins", nargs="?", const="", metavar="FILE")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--part", choices=PARTS, action="append", help="run this one; may be given again; default: all")
    parser.add_argument("--minutes", type=float, help=f"after which a part ends; default: {PARTS}")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter that has the TRL to compare with")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "docs" / "gpu", help="of DEVICE.md and DEVICE.json")
    arguments = parser.parse_args()
    if arguments.constraints:
        print(tested_versions())
        return
    if arguments.pins is not None:
        print("\n".join(pins(Path(arguments.pins or tested_versions()).read_text())))
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
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / f"{slug(device_name())}.json"
    verdicts = [run_part(name, file, arguments) for name in arguments.part or PARTS]
    print("\n".join(["", *verdicts, f"written: {file.with_suffix('.md')}"]))
    sys.exit(not all(verdict.startswith("PASSED") for verdict in verdicts))


if __name__ == "__main__":
    main()
