"""Early stopping ends a run with a checkpoint and an export, also after a resume."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from nemo_kto.model_files.checkpoint_files import find_checkpoints
from tests.helpers.messages import Message, assert_names
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train

STOPPING = "exp_manager.create_early_stopping_callback"
MONITOR = "monitor: val_auc, mode: max"
SETTINGS = [
    f"{STOPPING}=true",
    f"exp_manager.early_stopping_callback_params={{{MONITOR}, min_delta: 9, patience: 2}}",  # no AUC improves by so much
    f"exp_manager.checkpoint_callback_params={{{MONITOR}, save_top_k: 1}}",
    *("trainer.kto.val_check_interval=1", "trainer.kto.save_interval=99"),  # only the best and the last are saved
    *("trainer.kto.max_steps=4", "trainer.kto.log_every_n_steps=2", "export.enabled=true"),
]
WHY = ("val_auc", "9", "2", "step 1")


def printed(model: Path, rows: Path, folder: Path, overrides: list[str]) -> str:
    """On a rank: the output of the job."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train(model, rows, folder, 2, [*SETTINGS, *overrides])
    return output.getvalue()


def test_a_run_without_improvement_stops(ranks: RankPool, deep_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    """The AUC is that of the examples of both data-parallel ranks, a multiple of half a pair; the best one is kept."""
    folder = tmp_path / "run"
    first, second = ranks.run(2, printed, deep_llama, kto_rows, folder, [])
    assert second == "", "only rank 0 prints"
    lines = first.splitlines()
    (title,) = [line for line in lines if line.startswith("nemo-kto kto stopped")]
    assert title.startswith("nemo-kto kto stopped by early stopping after step 3 of 4 (")
    assert Message("early stopping", *WHY) in lines
    assert Message("train", f"{STOPPING}=false") in lines
    assert list((folder / "hf").glob("*.safetensors"))
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "train/loss" in row] == [2, 3]
    assert [row["train/rows"] for row in logged if "train/rows" in row] == [32, 16]
    auc = {row["step"]: row["val/auc"] for row in logged if "val/auc" in row}
    assert len(set(auc.values())) > 1, "equal values prove nothing"
    best = max(auc, key=lambda step: (auc[step], -step))
    assert best < 3, "the last checkpoint proves nothing"
    assert sorted(checkpoint.step for checkpoint in find_checkpoints(folder / "checkpoints")) == sorted({best, 3})
    assert f"step_{best:06} (val_auc {auc[best]:.4f}, highest of 2 kept checkpoints)" in first
    counts = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    pairs = {line["step"]: sum(line["desirable"]) * sum(line["undesirable"]) for line in counts}
    for step, value in auc.items():
        assert abs(2 * pairs[step] * value - round(2 * pairs[step] * value)) < 1e-9
    again = ranks.run(2, printed, deep_llama, kto_rows, folder, [])[0]
    assert_names(again, "nemo-kto", "step 3 of 4", "early stopping", *WHY, f"{folder}", f"{STOPPING}=false")
    longer = ranks.run(2, printed, deep_llama, kto_rows, folder, [f"{STOPPING}=false"])[0]
    assert "nemo-kto kto finished after step 4 of 4" in longer
