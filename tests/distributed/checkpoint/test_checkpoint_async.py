"""Saving: checkpoints have the values of their step, are complete, absent, or one error; damaged ones are never chosen."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_kto.checkpoint import writer
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

LAYOUT = state.Layout()
SLOW_SECONDS = 0.2  # of a slow disk, for a file
write_file = writer.write_file


def trained(model: Path, run: Path, *, async_save: bool = True, distributed: bool = True) -> SavedRun:
    """A run of which nothing is saved yet."""
    chunks, _ = lora_jobs.build(model, LAYOUT, None, distributed=distributed)
    made = SavedRun(model, run, chunks, lora_jobs.optimizer_of(chunks, distributed=distributed))
    made.manager.async_save = async_save
    return made


def message(action: Any) -> str:
    return message_of(action) or "nothing"


def two_steps_during_a_save(model: Path, folder: Path, distributed: bool) -> dict[str, Any]:
    """Save after each of two steps, with and without two more steps before the second save is written."""
    state.init_distributed(layout=LAYOUT, seed=3)
    slow = trained(model, folder / "slow", distributed=distributed)
    slow.steps(1)
    slow.manager.save({"step": 1}, {})
    slow.manager.finish()
    slow.steps(1)
    disk = threading.Event()

    def when_the_disk_is_ready(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert disk.wait(60)
        return write_file(*arguments, **options)

    with mock.patch.object(writer, "write_file", when_the_disk_is_ready):
        begun = slow.manager.save({"step": 2}, {})
        polled = []
        for _ in range(2):
            slow.steps(1)
            polled.append(slow.manager.poll())
        names = sorted(os.listdir(folder / "slow"))
        disk.set()
        written = slow.manager.finish()
    again = slow.manager.poll(), slow.manager.finish()
    at_once = trained(model, folder / "at_once", async_save=False, distributed=distributed)
    at_once.steps(2)

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return write_file(*arguments, **options)

    with mock.patch.object(writer, "write_file", slowly):
        same = at_once.manager.save({"step": 2}, {})
    assert written is not None
    assert same is not None
    return {
        "before": (begun, *polled, *again),
        "names": names,
        "step": (written.step, same.step),
        "stall": (0 < written.stall_seconds < written.seconds, SLOW_SECONDS <= same.stall_seconds <= same.seconds),
    }


@pytest.mark.parametrize(
    "distributed", [True, pytest.param(False, marks=pytest.mark.full)], ids=["distributed_optimizer", "replicated_optimizer"]
)
def test_a_checkpoint_has_the_values_of_its_step(
    distributed: bool, ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    for found in ranks.run(2, two_steps_during_a_save, tiny_llama, tmp_path, distributed):
        assert found["before"] == (None,) * 5
        assert found["names"] == [".writing-step_000002", "step_000001"]
        assert found["step"] == (2, 2)
        assert found["stall"] == (True, True)
    slow, at_once = (json.loads((tmp_path / run / "step_000002/trainer.json").read_text()) for run in ("slow", "at_once"))
    shards = {name: kept for name, kept in at_once["files"].items() if name.endswith(".distcp")}
    assert shards == {name: kept for name, kept in slow["files"].items() if name.endswith(".distcp")}
    assert set(slow["files"]) >= {"rng/00000.pt", "rng/00001.pt", "state/.metadata", "hf/tokenizer.json", "hf/config.json"}
    sizes = [kept["size"] for kept in shards.values()]
    assert len(sizes) == 2
    assert min(sizes) > 0.8 * max(sizes), "each rank writes its shard"


Usage = namedtuple("Usage", "total used free")


def saves_during_a_removal(model: Path, root: Path) -> dict[bool, tuple[list[Any], list[str]]]:
    """Whether there is room -> steps that three saves and the end give, and names before the oldest may be removed."""
    state.init_distributed(layout=LAYOUT, seed=3)
    run, remove, found = trained(model, root), writer.remove_folder, {}
    run.steps(1)
    for has_room in (True, False):
        folder = root / str(has_room)
        manager = lora_jobs.manager_of(run.chunks, run.optimizer, folder, model)
        manager.async_save, manager.save_top_k = True, 0
        may_go, oldest = threading.Event(), folder / "step_000001"

        def remove_later(path: Path, may_go: threading.Event = may_go) -> None:
            may_go.wait(10)  # a save that waits for this finds it removed
            time.sleep(0.3)
            remove(path)

        def usage(path: Path, may_go: threading.Event = may_go, oldest: Path = oldest) -> Usage:
            may_go.set()
            return Usage(10**12, 0, 0 if oldest.exists() else 10**12)

        with mock.patch.object(writer, "remove_folder", remove_later):
            given = [manager.save({"step": step}, {}) for step in (1, 2)]
            with contextlib.nullcontext() if has_room else mock.patch.object(shutil, "disk_usage", usage):
                given.append(manager.save({"step": 3}, {}))
            torch.distributed.barrier()
            names = sorted(os.listdir(folder))
            torch.distributed.barrier()
            may_go.set()
            given.append(manager.finish())
        found[has_room] = [each and each.step for each in given], names
    return found


def test_a_save_waits_for_a_removal_only_if_it_needs_the_space(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    for found in ranks.run(2, saves_during_a_removal, tiny_llama, tmp_path):
        for has_room, (given, names) in found.items():
            assert given == [None, 1, 2, 3], "a save returns the previous one"
            left = [name for name in names if name != ".writing-step_000003"]
            assert left == (["step_000001", "step_000002"] if has_room else ["step_000002"])


def failures(model: Path, folder: Path) -> list[Any]:
    """The errors of saves for which there is no room, that one rank cannot write, and that fail on all."""
    state.init_distributed(layout=LAYOUT, seed=3)
    run = trained(model, folder)
    run.steps(1)
    run.manager.save({"step": 1}, {})
    run.manager.finish()
    found: list[Any] = []

    def note(error: str) -> None:
        found.append((error, sorted(os.listdir(folder))))

    with mock.patch.object(shutil, "disk_usage", return_value=Usage(10, 9, 1000)):
        note(message(lambda: run.manager.save({"step": 2}, {})))

    def full(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.suffix == ".distcp" and state.rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_file(file, *arguments, **options)

    with mock.patch.object(writer, "write_file", full):
        run.manager.save({"step": 2}, {})
        note(message(run.manager.finish))

    def broken(file: Path, *arguments: Any, **options: Any) -> Any:
        raise ValueError("broken")

    with mock.patch.object(writer, "write_file", broken):
        run.manager.save({"step": 2}, {})
        run.manager._save.thread.join()  # type: ignore[union-attr]
        note(message(run.manager.poll))
    run.manager.save({"step": 3}, {})
    note(str(run.manager.finish().step))  # type: ignore[union-attr]
    return found


def test_a_failure_is_one_error_on_every_rank_and_keeps_earlier_checkpoints(
    ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    first, second = ranks.run(2, failures, tiny_llama, tmp_path)
    assert first == second
    remedy, step = "exp_manager.checkpoint_callback_params.save_top_k", f"{tmp_path}/step_000002"
    before, during, other, after = first
    assert before[0] == Message("UserError", step, "0.00 MB", remedy)
    assert during[0] == Message("UserError", step, "No space left on device", remedy)
    assert other[0] == Message("RuntimeError", "ValueError: broken")
    assert after == ("3", ["step_000001", "step_000003"])
    assert [names for _, names in (before, during, other)] == [["step_000001"]] * 3


def on_a_small_disk(model: Path, folder: Path) -> list[str]:
    """Saves until the disk is full, which the estimate does not see coming."""
    state.init_distributed(layout=LAYOUT, seed=3)
    run = trained(model, folder)
    run.steps(1)
    usage = shutil.disk_usage
    errors = []
    for step in range(1, 9):
        with mock.patch.object(shutil, "disk_usage", lambda path: Usage(10**9, 0, max(usage(path).free, 10**8))):
            errors.append(message(lambda step=step: [run.manager.save({"step": step}, {}), run.manager.finish()]))
        if errors[-1] != "nothing":
            break
    return errors


def test_a_full_disk(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root mounts a small disk")
    try:
        first, second = ranks.run(2, on_a_small_disk, tiny_llama, disk / "run")
        assert first == second
        *before, last = first
        assert before
        assert set(before) == {"nothing"}
        step = f"{disk}/run/step_{len(first):06d}"
        assert last == Message("UserError", step, "0.10 GB", "No space left on device", "free")
        assert sorted(os.listdir(disk / "run")) == [f"step_{step:06d}" for step in range(1, len(first))]
    finally:
        subprocess.run(["umount", disk], check=True)


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
