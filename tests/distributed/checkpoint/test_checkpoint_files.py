"""Choice of checkpoints, and the state of the folder after a disk error during a save."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nemo_kto.checkpoint.manager import CheckpointManager
from nemo_kto.distributed import state
from nemo_kto.model_files.checkpoint_files import find_checkpoints
from tests.helpers import lora_jobs
from tests.helpers.hf_jobs import message_of
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun
from tests.helpers.training_jobs import train
from tests.unit.model_files.test_checkpoint_files import flip

UMASK = os.umask(0)
os.umask(UMASK)


def cut_short(checkpoint: Path) -> None:
    shard = next((checkpoint / "state").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a shard is cut short": cut_short,
    "a shard is missing": lambda checkpoint: next((checkpoint / "state").glob("*.distcp")).unlink(),
    "generators are missing": lambda checkpoint: shutil.rmtree(checkpoint / "rng"),
    "no trainer.json": lambda checkpoint: (checkpoint / "trainer.json").unlink(),
    "half a trainer.json": lambda checkpoint: (checkpoint / "trainer.json").write_text('{"trainer": {"st'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_never_chosen(damage: str, saved_run: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_run / "checkpoints", tmp_path, dirs_exist_ok=True)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1, 2, 3]
    DAMAGES[damage](tmp_path / "step_000003")
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1, 2]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(
    saved_run: Path, ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    """Both ranks hear of damage that only one of them has read."""
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    shutil.rmtree(run / "checkpoints/step_000003")
    flip(run / "checkpoints/step_000001/hf/tokenizer.json")
    flip(next((run / "checkpoints/step_000002/state").glob("*.distcp")))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    errors = ranks.run(2, what_stops, tiny_llama, kto_rows, run, 2, ["trainer.kto.max_steps=3"])
    damaged = ("step_000002: state/__0_0.distcp", "step_000001: hf/tokenizer.json")
    assert errors == [Message("UserError", f"{run}/checkpoints", *damaged, "remove")] * 2
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def two_saves(folder: Path, model: Path) -> None:
    """Checkpoints before and after the model goes away."""
    state.init_distributed(layout=state.Layout(), seed=3)
    chunks, _ = lora_jobs.build(model, state.Layout(), None)
    run = SavedRun(model, folder, chunks, lora_jobs.optimizer_of(chunks))
    run.steps(1)
    run.manager.save({"step": 1}, {})
    shutil.rmtree(model)
    run.manager.save({"step": 2}, {})


def test_a_model_folder_that_changes_during_a_run_loses_no_checkpoint(
    ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    """Files that may only be read, a fifo, and the folder gone after the first save."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    for file in model.iterdir():
        file.chmod(0o400)
    os.mkfifo(model / "merges.txt")
    (model / "odd.json").mkdir()
    ranks.run(1, two_saves, tmp_path / "run", model)
    for step in (1, 2):
        copies = tmp_path / f"run/step_{step:06d}/hf"
        assert {file.name for file in copies.iterdir()} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
        for copied in copies.iterdir():
            assert copied.read_bytes() == (tiny_llama / copied.name).read_bytes()
            assert copied.stat().st_mode & 0o777 == 0o666 & ~UMASK


def what_stops(*arguments: Any) -> str:
    """The error of a job, as text."""
    return message_of(lambda: train(*arguments))


def with_a_full_disk(model: Path, rows: Path, folder: Path) -> str:
    """A job whose disk takes no file of more than 50 kB from the second save on; the error it ends with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = CheckpointManager.save

    def limited(self: CheckpointManager, trainer_state: dict[str, int], metrics: dict[str, float]) -> None:
        if trainer_state["step"] > 1:
            self.finish()  # the save of step 1 may still be writing
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        save(self, trainer_state, metrics)

    overrides = ["trainer.kto.max_steps=2", "trainer.kto.save_interval=1", "model.tensor_model_parallel_size=2"]
    try:
        with mock.patch.object(CheckpointManager, "save", limited):
            return what_stops(model, rows, folder, 2, overrides)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.full
def test_a_full_disk_stops_every_rank_and_loses_no_earlier_checkpoint(
    ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    errors = ranks.run(2, with_a_full_disk, tiny_llama, kto_rows, tmp_path)
    final, key = str(tmp_path / "checkpoints/step_000002"), "exp_manager.checkpoint_callback_params.save_top_k"
    assert errors == [Message("UserError", final, "File too large", "free", key)] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"], "no partial checkpoint is left"
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path / "checkpoints")] == [1]
    ranks.run(2, train, tiny_llama, kto_rows, tmp_path, 2, ["trainer.kto.max_steps=2", "model.tensor_model_parallel_size=2"])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
