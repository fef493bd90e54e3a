"""The environment of `make gpu`: without a package index, inside another environment, and its versions."""

from __future__ import annotations

import ensurepip
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY, load_script
from tests.helpers.messages import assert_names
from tests.integration.test_wheel import pins

gpu_report = load_script("benchmarks/gpu_report.py")
gpu_wheels = load_script("benchmarks/gpu_wheels.py")


def make_environment(python: str, venv: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    """Run .ci/gpu-environment where no index can be reached."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = [".ci/gpu-environment", python, str(venv), "1.16.*", str(wheels)]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def write_wheel(folder: Path, name: str) -> Path:
    """A wheel of one module whose ``value`` is 42."""
    info, wheel = f"{name}-1.0.dist-info", folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.py", "value = 42\n" + "".join(f"# line {n * n}\n" for n in range(9999)))
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.mark.full  # a minute, of which most are imports of torch
def test_an_environment_without_a_package_index(tmp_path: Path) -> None:
    """Three deep: this one, which has torch; one that sees it; that of `make gpu`, which sees both."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (pip,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(pip, wheels)
    carried = write_wheel(wheels, "carried")
    gpu_wheels.recompress(carried)
    assert {entry.compress_type for entry in zipfile.ZipFile(carried).infolist()} == {zipfile.ZIP_LZMA}
    outer = tmp_path / "outer"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", outer], check=True)
    (site,) = outer.glob("lib/python*/site-packages")
    (site / "this.pth").write_text(f"import site; site.addsitedir({str(Path(pytest.__file__).parents[1])!r})\n")
    (site / "carried.py").write_text("value = 1\n")

    done = make_environment(str(outer / "bin" / "python"), tmp_path / "new", wheels)
    assert done.returncode == 0, done.stderr
    program = "import carried, megatron.core, nemo_kto, torch; print(carried.value, torch.__file__, nemo_kto.__file__)"
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    expected = f"42 {torch.origin} {REPOSITORY / 'nemo_kto' / '__init__.py'}\n"
    for name in ("new", "new-trl"):
        command = [str(tmp_path / name / "bin" / "python"), "-W", "ignore", "-c", program]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert shown.stdout == expected, shown.stderr
    assert sorted(each.name for each in site.iterdir()) == ["carried.py", "this.pth"], "unchanged"


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    done = make_environment(sys.executable, tmp_path / "new", tmp_path)
    assert_names(done.stderr, "WHEELS", f"{tmp_path}", "gpu-wheels")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])


def test_an_environment_that_pip_confuses_with_the_outer_one_is_refused() -> None:
    """pip compares path prefixes: .venv-py312 would be within .venv, and pip would remove packages there."""
    venv = Path(os.path.realpath(sys.prefix)[:-1])
    done = make_environment(sys.executable, venv, REPOSITORY / "wheels")
    assert_names(done.stderr, "VENV", f"{venv}", "set VENV=")
    assert (done.returncode, venv.exists()) == (2, False)


def test_too_many_wheels_are_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path, "small")
    (tmp_path / "large-1-py3-none-any.whl").write_bytes(bytes(1_000_000))
    size = sum(wheel.stat().st_size for wheel in tmp_path.iterdir())
    assert gpu_wheels.MAX_BYTES == 60_000_000
    assert gpu_wheels.summary(tmp_path, limit=size + 1) == (f"{tmp_path}: 2 wheels, 1.0 MB", True)
    line, fits = gpu_wheels.summary(tmp_path, limit=size)
    assert not fits
    assert_names(line, f"{tmp_path}", "1.0 MB", "NEEDED")
    assert line.index("large-1") < line.index("small-1.0"), "the largest come first"


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
    installed = gpu_report.version_of("megatron-core")
    for file in ("constraints.txt", "constraints-py312.txt"):
        version = pins(REPOSITORY / file)["megatron-core"]
        found = [line for line in gpu_report.pins((REPOSITORY / file).read_text()) if line.startswith("megatron-core")]
        assert found == [f"megatron-core=={version}"], f"whatever is installed, here {installed}"
    programs = ["Makefile", "Dockerfile", *(f".ci/{file.name}" for file in (REPOSITORY / ".ci").iterdir())]
    texts = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in programs}
    assert [name for name, text in texts.items() if re.search(r"megatron[-_]core\s*[=<>~]=?\s*\d", text)] == []
    assert "gpu_report.py --pins >" in texts["Dockerfile"]
    assert "gpu_report.py --pins >" in texts[".ci/gpu-environment"]
    assert "constraints-py312.txt" not in texts["Dockerfile"].split("RUN", 1)[1]


def test_the_makefile_and_the_report_choose_the_same_constraints() -> None:
    show = ["make", "--silent", "--eval=show: ; @echo $(CONSTRAINTS)", "show", f"PYTHON={sys.executable}"]
    chosen = subprocess.run(show, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "benchmarks/gpu_report.py", "--constraints"]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
    assert shown == str(REPOSITORY / chosen)
    assert chosen == {11: "constraints.txt", 12: "constraints-py312.txt", 13: "constraints.txt"}[sys.version_info.minor]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-py312.txt"])
def test_transformer_engine_has_one_version(file: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = map(Requirement, project["optional-dependencies"]["gpu"])
    assert (needed.name, str(needed.specifier)) == ("transformer-engine", "==2.20.*")
    assert pins(REPOSITORY / file)["transformer-engine"] in needed.specifier
