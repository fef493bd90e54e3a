"""Versions of what `make gpu` measures with, and the constraints with which its environment and the image are installed.

    python benchmarks/gpu_versions.py --check    status 2 and a message where there is no GPU; any Python 3 will do
    python benchmarks/gpu_versions.py --constraints    the file of tested versions for this interpreter's Python
    python benchmarks/gpu_versions.py --pins [FILE]    constraints for pip: what is installed and compiled against this
                                                       interpreter's torch, and that file's versions of what is not installed

It works alone, beside a file of constraints.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
USAGE_ERROR = 2
NO_GPU = (
    "make gpu: this machine must have an NVIDIA GPU and its driver, got none that the driver library (libcuda.so.1) finds; "
    "run it on one, in a container with --gpus all (docs/gpu/README.md)"
)
SOURCES = ("nemo_kto/**/*.py", "conf/**/*.yaml", "tests/**/*.py", "benchmarks/gpu*.py")
DRAWING = ("gpu_report.py", "gpu_tables.py", "gpu_versions.py")  # no figure depends on these
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

_LIBRARIES = "import torch; print(torch.backends.cudnn.version(), '.'.join(map(str, torch.cuda.nccl.version())))"


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
    """Of the files that the results depend on, by their names and contents."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in SOURCES for file in REPOSITORY.glob(pattern) if file.name not in DRAWING}):
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

    libraries = output_of(sys.executable, "-c", _LIBRARIES) or "unknown unknown"  # it ends where there are none
    cudnn, nccl = libraries.split(maxsplit=1)
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
        "cuDNN": cudnn,
        "NCCL": nccl,
        **{package: version_of(package) for package in _PACKAGES},
        "TRL": trl or "not installed",
        "requirements not met": ", ".join(unmet()) or "none",
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "not known",
        "sources": source_digest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--constraints", action="store_true")
    parser.add_argument("--pins", nargs="?", const="", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.constraints:
        print(tested_versions())
    elif arguments.pins is not None:
        print("\n".join(pins(Path(arguments.pins or tested_versions()).read_text())))
    elif arguments.check and not gpu_count():
        print(NO_GPU, file=sys.stderr)
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
