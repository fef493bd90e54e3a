"""Configurations that are right as they stand, of every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest

from nemo_kto.launch import compose
from nemo_kto.launch.schema import ALGORITHMS, KTO, Algorithm, RunConfig


class Load(Protocol):
    """``load("key=value", ...)``: the typed configuration."""

    def __call__(self, *overrides: str, algorithm: Algorithm = KTO) -> RunConfig: ...


def of(algorithm: Algorithm, texts: Sequence[str]) -> list[str]:
    """Texts in which ALGORITHM stands for a name, so that one table serves them all."""
    return [text.replace("ALGORITHM", algorithm.name) for text in texts]


@pytest.fixture(params=ALGORITHMS.values(), ids=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    """One after the other."""
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
        source = compose.Source(algorithm.config_name)
        config, problems = compose.to_config(compose.load([*good, *overrides], source=source))
        assert problems == []
        assert config is not None
        return config

    return get
