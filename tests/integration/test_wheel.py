"""An installed wheel works outside the repository: command, configuration, and all keys."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.conftest import REPOSITORY

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
BUILD = [sys.executable, "-m", "build", "--no-isolation"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive of what git knows, and the wheel that is built from the archive."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"  # a copy, because setuptools builds in the folder and reuses what an earlier build left
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    subprocess.run([*BUILD, "--outdir", folder, source], check=True, capture_output=True)
    subprocess.run([*BUILD, "--wheel", "--outdir", folder / "of_the_sources", source], check=True, capture_output=True)
    return folder


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()]


def contents(wheel: Path) -> dict[str, int]:
    """Name -> checksum of each file."""
    return {file.filename: file.CRC for file in zipfile.ZipFile(wheel).infolist()}


@pytest.mark.full
def test_the_source_archive_is_complete(built: Path) -> None:
    (archive,) = built.glob("nemo_kto-*.tar.gz")
    with tarfile.open(archive) as files:
        shipped = {name.partition("/")[2] for name in files.getnames()}
    assert set(tracked()) - shipped == {".gitignore"}
    assert not [name for name in shipped if "__pycache__" in name]


@pytest.mark.full
def test_the_wheel_from_the_archive_equals_the_wheel_from_the_sources(built: Path) -> None:
    (wheel,), (direct,) = built.glob("*.whl"), built.glob("of_the_sources/*.whl")
    assert contents(wheel) == contents(direct)
    assert "nemo_kto/py.typed" in contents(wheel)
    written = {file.relative_to(REPOSITORY).as_posix() for file in (REPOSITORY / "conf").rglob("*.yaml")}
    tables = {f"config/{name}.yaml" for name in ("nemo_aligner", "other_trainers")}
    assert {f"nemo_kto/{name}" for name in written | tables} <= contents(wheel).keys()


def bounds() -> dict[str, SpecifierSet]:
    """The versions that pyproject.toml allows of each package that it needs to run, with its extras."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        each for name, needs in project["optional-dependencies"].items() if name not in ("test", "gpu") for each in needs
    ]
    return {each.name: each.specifier for each in map(Requirement, [*project["dependencies"], *extras])}


def pins(file: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_every_package_has_bounds_and_the_lower_bounds_are_tested() -> None:
    unbound = [name for name, found in bounds().items() if {each.operator for each in found} != {">=", "<"}]
    assert not unbound
    lowest, tested = {}, pins(REPOSITORY / "constraints-lowest.txt")
    for name, found in bounds().items():
        (lowest[name],) = [Version(each.version) for each in found if each.operator == ">="]
    assert lowest == {name: Version(tested[name]) for name in lowest}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-py312.txt"])
def test_constraints_are_within_the_bounds(file: str) -> None:
    known = bounds()
    assert not [
        f"{name}=={pin}" for name, pin in pins(REPOSITORY / file).items() if name in known and pin not in known[name]
    ]


@pytest.mark.full
def test_the_command_works_from_a_wheel(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    installed = tmp_path / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--target", installed, wheel], check=True)
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        f"import nemo_kto, nemo_kto.cli.main as cli; assert nemo_kto.__file__.startswith({str(installed)!r})\n"
        "from nemo_kto.config import compose; assert compose.config_path() == 'pkg://nemo_kto.conf'\n"
        "cli.main(['kto', '--help'])"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "model.kto.ref_policy_kl_penalty" in shown.stdout
    assert "Four ranks on this machine" in shown.stdout
