"""Collects the wheels that `make gpu WHEELS=FOLDER` needs on a machine with torch and transformers and no package index.

    python3.12 benchmarks/gpu_wheels.py FOLDER [--trl 1.16.*]

For Python 3.12 on Linux x86-64, in the versions of constraints-py312.txt, from the index of the machine that this runs on.
pip resolves all requirements; of the result, only the packages in NEEDED are downloaded. The others come with torch and
transformers; the page of `make gpu` names a version that pyproject.toml does not allow. tensorboard, mlflow and wandb are
left out, as the GPU tests and the benchmark write no such logs.

Wheels are compressed again with LZMA, which pip unpacks as well; pyarrow and pandas alone would be too large otherwise. The
folder has less than 60 MB, or the status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONSTRAINTS = REPOSITORY / "constraints-py312.txt"
MAX_BYTES = 60_000_000
# Each line: a package that is asked for, then those that it needs besides torch, transformers and their requirements.
NEEDED = """
megatron-core
click
hydra-core antlr4-python3-runtime omegaconf
pydantic pydantic-core typing-inspection annotated-types
datasets pyarrow pandas python-dateutil six dill multiprocess xxhash
psutil
cloudpickle
pytest iniconfig pluggy
pytest-timeout
pytest-xdist execnet
liger-kernel
peft accelerate
trl
pip
"""
# Requirements of these that the machine has with torch, transformers and pytorch-lightning.
PRESENT = """
torch setuptools numpy filelock fsspec jinja2 typing-extensions
transformers huggingface-hub tokenizers safetensors packaging pygments pyyaml tqdm
pytorch-lightning
"""
SOURCE_ONLY = "antlr4-python3-runtime==4.9.*"  # there is no wheel of it; it is Python alone
# pip compares these tags as they are: an older one is not implied.
PLATFORMS = ["linux_x86_64", "manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
PLATFORMS += [f"manylinux_2_{minor}_x86_64" for minor in range(5, 29)]
TARGET = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
TARGET += [f"--platform={name}" for name in PLATFORMS]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def normal(name: str) -> str:
    """The name of a package as indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(folder: Path, *, trl: str) -> list[str]:
    """``name==version`` of the packages in NEEDED, as pip chooses them together with torch and transformers.

    Args:
        folder: for scratch files; it has the wheel of SOURCE_ONLY.
        trl: version of TRL, as in a requirement.
    """
    constraints, report = folder / "constraints.txt", folder / "report.json"
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    constraints.write_text("\n".join(line for line in lines if not line.startswith("trl==")))
    asked = [line.split()[0] for line in NEEDED.split("\n") if line]
    asked[asked.index("trl")] = f"trl=={trl}"
    command = [*PIP, "install", "--dry-run", "--ignore-installed", "--target", str(folder / "none"), "--report", str(report)]
    command += [*TARGET, "--find-links", str(folder), "--constraint", str(constraints), "transformers", *asked]
    subprocess.run(command, check=True)
    installed = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    found = {normal(each["name"]): each["version"] for each in installed}
    return [f"{name}=={found[name]}" for name in NEEDED.split() if name in found]


def recompress(wheel: Path) -> None:
    """Write a wheel again, its files compressed with LZMA. pip's stays as it is: Python runs it from the archive."""
    if wheel.name.startswith("pip-"):
        return
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(new, "w") as after:
        for entry in before.infolist():
            after.writestr(entry, before.read(entry), zipfile.ZIP_LZMA)
    if new.stat().st_size < wheel.stat().st_size:
        new.replace(wheel)
    new.unlink(missing_ok=True)


def summary(folder: Path, *, limit: int = MAX_BYTES) -> tuple[str, bool]:
    """A line on the size of a folder of wheels, and whether it is below the limit."""
    sizes = {wheel.name: wheel.stat().st_size for wheel in folder.glob("*.whl")}
    total = sum(sizes.values())
    if total < limit:
        return f"{folder}: {len(sizes)} wheels, {total / 1e6:.1f} MB", True
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return (
        f"{folder}: the wheels must have less than {limit / 1e6:.0f} MB, got {total / 1e6:.1f} MB, most of it in "
        f"{', '.join(largest)}; leave a package out of NEEDED (benchmarks/gpu_wheels.py)"
    ), False


def collect(folder: Path, *, trl: str) -> None:
    """Fill ``folder``, which may exist, with the wheels and nothing else."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", scratch, SOURCE_ONLY], check=True)
        wheels = Path(scratch) / "wheels"
        command = [*PIP, "download", "--no-deps", "--dest", str(wheels), "--find-links", scratch, *TARGET]
        subprocess.run([*command, *resolve(Path(scratch), trl=trl)], check=True)
        largest_first = sorted(wheels.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
            list(processes.map(recompress, largest_first))
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        for wheel in largest_first:
            shutil.move(wheel, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", default="1.16.*", help="the version of TRL to compare with")
    arguments = parser.parse_args()
    if sys.version_info[:2] != (3, 12):  # pip compares requirements with the Python that runs it
        found = f"{platform.python_version()} ({sys.executable})"
        sys.exit(f"make gpu-wheels: Python must be 3.12, got {found}; set PYTHON312=...")
    collect(arguments.folder, trl=arguments.trl)
    line, fits = summary(arguments.folder)
    print(line, file=sys.stdout if fits else sys.stderr)
    sys.exit(not fits)


if __name__ == "__main__":
    main()
