"""Configurations that are right as they stand, of every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from nemo_kto.launch import compose
from nemo_kto.launch.schema import ALGORITHMS, KTO, Algorithm, RunConfig


class Load(Protocol):
    """``load("key=value", ...)``: the typed configuration."""

    def __call__(self, *overrides: str, algorithm: Algorithm = KTO) -> RunConfig: ...


@cache
def _composed(config_name: str) -> DictConfig:
    return compose.load(source=compose.Source(config_name))


def composed(overrides: Sequence[str], algorithm: Algorithm) -> DictConfig:
    """What ``compose.load`` gives (test_compose.py compares), with the YAML files read and merged once a process.

    Hydra's own last step is what is done here: overrides of values are applied to what the files give. It cannot choose
    other files (``hardware=cpu``).
    """
    config = _composed(algorithm.config_name).copy()
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(list(overrides)), config)
    return config


def typed(overrides: Sequence[str], algorithm: Algorithm) -> RunConfig:
    """The typed configuration of overrides that are right by their types."""
    config, problems = compose.to_config(composed(overrides, algorithm))
    assert problems == []
    assert config is not None
    return config


def of(algorithm: Algorithm, texts: Sequence[str]) -> list[str]:
    """Texts in which ALGORITHM stands for a name, so that one table serves them all."""
    return [text.replace("ALGORITHM", algorithm.name) for text in texts]


@pytest.fixture(params=ALGORITHMS.values(), ids=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    """One after the other."""
    found: Algorithm = request.param
    return found


@pytest.fixture(params=[each for each in ALGORITHMS.values() if each is not KTO], ids=lambda each: each.name)
def other(request: pytest.FixtureRequest) -> Algorithm:
    """Each but KTO, for which the tables are gone through one entry after the other."""
    found: Algorithm = request.param
    return found


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides that name a model folder and a data file that exist."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "response": "r", "preference": "chosen"}\n')
    return [
        f"pretrained_checkpoint.restore_from_path={tmp_path}/model",
        f"model.data.data_prefix={tmp_path}/rows.jsonl",
        "trainer.accelerator=cpu",
    ]


@pytest.fixture
def load(good: list[str]) -> Load:
    """What makes a typed configuration of overrides."""

    def get(*overrides: str, algorithm: Algorithm = KTO) -> RunConfig:
        return typed([*good, *overrides], algorithm)

    return get
