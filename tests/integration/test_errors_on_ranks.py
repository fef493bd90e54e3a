"""Errors that only the ranks find: status 2 and one message, whether one rank or all find them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_rows, write_rows

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def train(folder: Path, rows: list[dict[str, str]], *given: str) -> subprocess.CompletedProcess[str]:
    """Two ranks that share every layer."""
    words = [
        "pretrained_checkpoint.restore_from_path=model",
        f"model.data.data_prefix={write_rows(folder / 'rows.jsonl', rows).name}",
        "model.data.cache_dir=cache",
        "model.data.seq_length=64",
        "model.global_batch_size=4",
        "model.tensor_model_parallel_size=2",
        "trainer.devices=2",
        "hardware=cpu",
    ]
    return run([*CLI, "kto", *words, *given], cwd=folder, env=environment(), preload=TRAINING, timeout=300)


def assert_said_once(done: subprocess.CompletedProcess[str], *names: str) -> None:
    assert done.returncode == 2
    assert_names(done.stderr.partition("nemo-kto: ")[2], *names)  # libraries may have warned before
    assert done.stderr.count("nemo-kto: ") == 1
    assert "Traceback" not in done.stderr


def test_an_error_on_one_rank(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights[DOWN][0, -1] = torch.nan  # of the last column, which the second rank holds
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    done = train(tmp_path, make_rows(8))
    assert_said_once(done, "model/model.safetensors", DOWN, "finite", "download")
    left = {path.name for path in (tmp_path / "results").rglob("*") if path.is_file()}
    assert left <= {".lock", ".lock.owner"}, "the waiting rank 0 is killed, and its lock becomes free"


def test_an_error_on_all_ranks(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights[DOWN]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    done = train(tmp_path, make_rows(8))
    assert_said_once(done, "model", "config.json", "LlamaForCausalLM", "1", DOWN, "download", "save_pretrained")


def test_an_internal_error_has_a_traceback(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from nemo_kto.algorithms.callbacks import Callback\n\nclass Own(Callback):\n"
        "    def __init__(self):\n        raise ValueError('not of the user')\n"
    )
    done = train(tmp_path, make_rows(8), "trainer.callbacks=[own.Own]")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.count("ValueError: not of the user") == 1
