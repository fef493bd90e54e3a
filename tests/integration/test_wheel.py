"""What is installed from a wheel works outside the repository: the command, its configuration, all keys."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# What the Dockerfile copies, too. A copy, because setuptools builds in the folder and reuses what an earlier build left.
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "nemo_kto", "conf")


def copy_sources(target: Path) -> Path:
    target.mkdir()
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


@pytest.mark.full
def test_the_command_works_from_a_wheel(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("nemo_kto-*.whl")
    shipped = {
        Path(name).relative_to("nemo_kto/conf").as_posix() for name in zipfile.ZipFile(wheel).namelist() if "/conf/" in name
    }
    written = {file.relative_to(REPOSITORY / "conf").as_posix() for file in (REPOSITORY / "conf").rglob("*.yaml")}
    assert written <= shipped

    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        f"import nemo_kto, nemo_kto.launch.cli as cli; assert nemo_kto.__file__.startswith({str(installed)!r})\n"
        "from nemo_kto.launch import compose; assert compose.config_path() == 'pkg://nemo_kto.conf'\n"
        "cli.main(['kto', '--help'])"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "model.kto.ref_policy_kl_penalty" in shown.stdout
    assert "Four ranks on this machine" in shown.stdout
