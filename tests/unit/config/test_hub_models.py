"""Hub models in a configuration: their commit is recorded, and a resumed run takes the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config import compose
from nemo_kto.config.checker import Checker, InvalidConfig
from nemo_kto.config.resolved import MODEL_KEYS, ResolvedRun, value_of
from nemo_kto.config.rules.training_rules import run_errors
from nemo_kto.config.saved_config import save_config
from nemo_kto.model_files.hub import _download
from tests.helpers.hub_cache import add_model
from tests.helpers.messages import Message
from tests.helpers.tiny_models import write_stub_adapter, write_stub_model

FIRST, SECOND = "1" * 40, "2" * 40
LORA = "model.peft.peft_scheme=lora"


def resolve(*overrides: str) -> ResolvedRun:
    checker = Checker(recipe=RECIPES["kto"], source=compose.our_source(RECIPES["kto"]), rules=run_errors)
    return checker.resolve(["trainer.accelerator=cpu", *overrides])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "response": "r", "preference": "chosen"}\n')
    add_model(cache, "org/model", write_stub_model(tmp_path / "model"), commit=FIRST)
    add_model(cache, "org/adapter", write_stub_adapter(tmp_path / "adapter"), commit=FIRST)
    return cache


def test_every_model_of_a_run_may_be_named_by_its_repository(hub: Path, tmp_path: Path) -> None:
    names = dict(zip(MODEL_KEYS, ("hf:org/model", "hf:org/model@main", "hf:org/adapter"), strict=True))
    run = resolve(
        *(f"{key}={name}" for key, name in names.items()),
        f"model.data.data_prefix={tmp_path}/rows.jsonl",
        f"exp_manager.explicit_log_dir={tmp_path}/run",
        LORA,
    )
    pinned = ["hf:org/model", "hf:org/model", "hf:org/adapter"]
    assert [value_of(run.cfg, key) for key in MODEL_KEYS] == [f"{name}@{FIRST}" for name in pinned]
    folders = [hub / f"models--org--{name}" / "snapshots" / FIRST for name in ("model", "model", "adapter")]
    assert [run.files.source, run.reference_folder, run.files.adapter_folder] == folders


def test_a_resumed_run_takes_the_commit_of_its_record(hub: Path, tmp_path: Path) -> None:
    command = [
        "pretrained_checkpoint.restore_from_path=hf:org/model",
        f"model.data.data_prefix={tmp_path}/rows.jsonl",
        f"exp_manager.explicit_log_dir={tmp_path}/run",
    ]
    save_config(resolve(*command).cfg)
    assert f"restore_from_path: hf:org/model@{FIRST}" in (tmp_path / "run" / "config.yaml").read_text()
    add_model(hub, "org/model", write_stub_model(tmp_path / "model"), commit=SECOND)
    _download.cache_clear()  # as in a new process
    assert resolve(*command).files.source.name == FIRST
    assert resolve(*command[:2], f"exp_manager.explicit_log_dir={tmp_path}/new").files.source.name == SECOND
    assert resolve(*command, "exp_manager.resume_if_exists=false").files.source.name == SECOND


def test_a_missing_model_is_one_error_beside_the_others(hub: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        resolve("pretrained_checkpoint.restore_from_path=hf:org/other", "model.data.data_prefix=none.jsonl", "model.seed=-1")
    assert sorted(map(str, caught.value.errors)) == [
        Message("model.data.data_prefix", "none.jsonl"),
        Message("model.seed", "-1"),
        Message("pretrained_checkpoint.restore_from_path", "hf:org/other", "hf download org/other"),
    ]


def test_a_command_that_needs_no_weights_does_not_miss_them(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    add_model(hub, "org/tokenizer", tmp_path / "model", commit=FIRST)
    rows = f"model.data.data_prefix={tmp_path}/rows.jsonl"
    overrides = ["pretrained_checkpoint.restore_from_path=hf:org/tokenizer", rows, "trainer.accelerator=cpu"]
    checker = Checker(recipe=RECIPES["kto"], source=compose.our_source(RECIPES["kto"]), rules=run_errors)
    assert replace(checker, weights=False).resolve(overrides).files.source.name == FIRST
    with pytest.raises(InvalidConfig, match=r"model\.safetensors is missing"):
        checker.resolve(overrides)
