"""A run on forty rows with the default splits, and its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import Message, assert_names
from tests.helpers.tiny_models import make_rows, write_rows


@pytest.mark.full
def test_forty_rows_are_enough_for_the_defaults(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{**row, "id": number, "source": "web"} for number, row in enumerate(make_rows(40))]
    rows[0]["response"] = "long " * 20
    file = write_rows(tmp_path / "rows.jsonl", rows)
    words = [f"pretrained_checkpoint.restore_from_path={tiny_llama}", f"model.data.data_prefix={file}", "hardware=cpu"]
    words += [f"model.data.cache_dir={tmp_path / 'cache'}", "model.data.seq_length=64", "export.enabled=false"]
    words += ["exp_manager.create_tensorboard_logger=false", "export.report=false", "trainer.kto.limit_train_batches=2"]
    done = run([*CLI, "kto", *words], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 2, done.stderr
    assert_names(
        done.stderr,
        "nemo-kto",
        "model.global_batch_size",
        "number",
        "40",
        "64",
        "model.global_batch_size=40",
        "train",
        "model.data.data_prefix",
    )
    assert not (tmp_path / "results").exists()

    done = run(
        [*CLI, "kto", *words, "model.global_batch_size=16"], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300
    )
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "results/gpt_kto/metrics.jsonl").read_text().splitlines()]
    assert [line["train/rows"] for line in logged if "train/loss" in line] == [16, 16]
    assert not any("val/loss" in line for line in logged)
    cache = tmp_path / "cache"
    assert [path for path in [cache, *cache.rglob("*")] if path.stat().st_mode & 0o077] == [], "rows may be private"
    expected = [
        Message(f"{file}", "used", "id", "40"),
        Message("validation", "40", "all", 'model.data.splits_string="50,50"', "null"),
        Message("train", "answer", "1", "40", "model.data.seq_length=64"),
    ]
    assert [text for text in expected if text not in done.stderr.splitlines()] == []
    assert "16 rows a step" in done.stdout
    assert "each epoch omits 8 rows" in done.stdout
