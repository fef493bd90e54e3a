"""A configuration that is right as it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.launch import compose
from nemo_kto.launch.schema import KTOConfig


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides that name a model folder and a data file that exist."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "response": "r", "preference": "chosen"}\n')
    return [
        f"pretrained_checkpoint.restore_from_path={tmp_path}/model",
        f"model.data.data_prefix={tmp_path}/rows.jsonl",
        "trainer.accelerator=cpu",
    ]


@pytest.fixture
def load(good: list[str]) -> Callable[..., KTOConfig]:
    """``load("key=value", ...)``: the typed configuration."""

    def get(*overrides: str) -> KTOConfig:
        config, problems = compose.to_config(compose.load([*good, *overrides]))
        assert problems == []
        assert config is not None
        return config

    return get
