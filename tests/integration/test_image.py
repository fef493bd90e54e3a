"""The Dockerfile: its base, the packages that it brings, the check of imports, and the commands that start containers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nemo_kto.config.rules.layout_rules import OLDEST_ENGINE
from tests.conftest import REPOSITORY
from tests.helpers.commands import environment
from tests.integration.test_wheel import pins

TEXTS = [
    file
    for pattern in (
        "*",
        ".ci/*",
        "docs/**/*.md",
        "docs/**/*.py",
        "examples/**/*",
        "benchmarks/*",
        "nemo_kto/**/*.py",
        "conf/**/*",
    )
    for file in sorted(REPOSITORY.glob(pattern))
    if file.is_file() and file.suffix in ("", ".md", ".py", ".sh", ".txt", ".yaml", ".toml") and ".venv" not in file.parts
]


class Image(NamedTuple):
    """A row of the table of NVIDIA's images."""

    tag: str
    torch: str
    cuda: str
    engine: str
    python: str


@pytest.fixture(scope="module")
def table() -> list[Image]:
    page = (REPOSITORY / "docs/scale/kubernetes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\d\d\.\d\d-py3)` \|(.*)\|$", page, re.M)
    return [Image(tag, *(cell.strip() for cell in rest.split("|")[:4])) for tag, rest in rows]


@pytest.fixture(scope="module")
def base(table: list[Image]) -> Image:
    """The image that the Dockerfile names."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    (tag,) = re.findall(r"^ARG BASE_IMAGE=nvcr\.io/nvidia/pytorch:(\S+)$", text, re.M)
    return next(image for image in table if image.tag == tag)


def test_the_base_has_what_the_code_needs(base: Image, table: list[Image]) -> None:
    """torch 2.11 has windows in its attention for packed sequences and adds products of bf16 matrices to fp32 sums."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = {re.split(r"[<>=]", line)[0]: line for line in project["dependencies"]}
    torch = Version(base.torch)
    assert SpecifierSet(needs["torch"].removeprefix("torch")).contains(torch, prereleases=True)
    assert torch.release >= (2, 11)
    tested = [pins(REPOSITORY / file)["torch"] for file in ("constraints.txt", "constraints-py312.txt")]
    assert torch.release[:2] in [Version(version).release[:2] for version in tested]
    assert Version(base.engine).release >= OLDEST_ENGINE
    assert SpecifierSet(project["requires-python"]).contains(base.python)
    assert base.python == "3.12", "constraints-py312.txt has the other packages"
    # the newest of the table that can be used
    assert base == max(table, key=lambda image: image.tag)


def test_every_image_that_is_named_is_the_base(base: Image) -> None:
    found = {
        (file.name, tag)
        for file in TEXTS
        for tag in re.findall(r"nvcr\.io/nvidia/(?:pytorch|nemo):([\w.-]+)", file.read_text(encoding="utf-8"))
    }
    assert {name for name, _ in found} >= {"Dockerfile", "README.md", "kubernetes.md"}
    assert {tag for _, tag in found} == {base.tag}


def test_containers_share_memory_and_lock_pages() -> None:
    """NCCL needs more shared memory than docker's 64 MB, and page-locked memory."""
    lines = [(file.name, line) for file in TEXTS for line in file.read_text(encoding="utf-8").splitlines()]
    started = [(name, line) for name, line in lines if re.search(r"\bdocker run\b.*--gpus", line)]
    assert len(started) >= 3
    assert [each for each in started if "--gpus all --ipc=host --ulimit memlock=-1 " not in each[1]] == []


@pytest.mark.parametrize("broken", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_build_imports_all_that_a_run_needs(broken: bool, tmp_path: Path) -> None:
    """Without Transformer Engine in the base, and with one that cannot be loaded."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = re.findall(r"(python3 -P -c '.*')$", text, re.M)
    if broken:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine/__init__.py").write_text("")
        (tmp_path / "transformer_engine/pytorch.py").write_text("raise OSError('libcudnn.so.9')")
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == broken, done.stderr
    assert done.stdout.split() == ([] if broken else ["torch", "megatron.core", "nemo_kto.cli.main"])
    assert ("OSError: libcudnn.so.9" in done.stderr) is broken
