"""The environment of `make gpu`: without a package index, inside another environment, and its versions."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY, load_script
from tests.integration.test_wheel import pins

gpu_versions = load_script("benchmarks/gpu_versions.py")
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
