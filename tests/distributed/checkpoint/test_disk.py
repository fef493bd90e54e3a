"""Room for checkpoints and the export, and a run folder that all machines share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.run.disk import _must_see, check_room, check_shared_folder, checkpoint_bytes, disk_need
from tests.helpers.job_cache import CHECKPOINTS
from tests.helpers.messages import Message, raises
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import resolved


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_the_size_of_a_checkpoint(saved_run: Path, tiny_llama: Path, kto_rows: Path) -> None:
    run = resolved(tiny_llama, kto_rows, saved_run, 1, [*CHECKPOINTS])
    assert checkpoint_bytes(run) == pytest.approx(bytes_in(saved_run / "checkpoints/step_000003/state"), rel=0.15)
    adapters = resolved(tiny_llama, kto_rows, saved_run, 1, ["model.peft.peft_scheme=lora"])
    assert 0 < checkpoint_bytes(adapters) < checkpoint_bytes(run)


# save_interval, save_top_k, step after which the run is resumed -> checkpoints at once, besides existing ones
COPIES = [(1, 1, None, 3), (1, 3, None, 5), (1, -1, None, 5), (0, 1, None, 1), (2, 1, 2, 2), (0, 1, 4, 1)]


@pytest.mark.parametrize(("interval", "top_k", "resumed", "copies"), COPIES)
def test_the_room_for_all_checkpoints(
    interval: int, top_k: int, resumed: int | None, copies: int, tiny_llama: Path, kto_rows: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kept = [f"trainer.kto.save_interval={interval}", f"exp_manager.checkpoint_callback_params.save_top_k={top_k}"]
    run = resolved(tiny_llama, kto_rows, tmp_path / "run", 1, [*kept, "export.enabled=true"])
    need = disk_need(run, 6, resumed_step=resumed)
    assert (need.copies, need.total) == (copies, copies * need.checkpoint + need.export)
    check_room(need, run)
    full = shutil.disk_usage(tmp_path)._replace(free=need.total - 1)
    monkeypatch.setattr("nemo_kto.run.disk.shutil.disk_usage", lambda folder: full)
    several = [f"save_top_k={top_k}", f"trainer.kto.save_interval={interval}"] if copies > 1 else []
    names = [f"{run.folder}", f"{copies} checkpoint", "export.enabled=false", "export.path", "exp_manager.explicit_log_dir"]
    with raises(UserError, *several, *(name + "s" * (copies > 1 and "checkpoint" in name) for name in names)):
        check_room(disk_need(run, 6, resumed_step=resumed), run)


def test_incomplete_checkpoints_of_a_killed_run_count_as_free(tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    run = resolved(tiny_llama, kto_rows, tmp_path / "run", 1, [*CHECKPOINTS])
    free = disk_need(run, 6, resumed_step=None).free
    part = run.checkpoints / ".writing-step_000003" / "state" / "part"
    part.parent.mkdir(parents=True)
    with part.open("wb") as file:
        file.truncate(2**42)  # sparse
    assert disk_need(run, 6, resumed_step=None).free > free + 2**41


def test_the_room_is_that_of_the_disk_with_the_checkpoints(
    tiny_llama: Path, kto_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = resolved(tiny_llama, kto_rows, tmp_path / "run", 1, [*CHECKPOINTS]), list[Path]()
    (other := tmp_path / "other").mkdir()
    run.folder.mkdir()
    run.checkpoints.symlink_to(other)
    usage = shutil.disk_usage
    monkeypatch.setattr("nemo_kto.run.disk.shutil.disk_usage", lambda folder: asked.append(folder) or usage(folder))
    disk_need(run, 6, resumed_step=None)
    assert asked == [other]


def test_cached_folders_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder on NFS: the machine has found before that it does not exist."""
    (token := tmp_path / "run" / "token").parent.mkdir()
    opened = list[Path]()
    token.touch()
    real, exists = os.open, Path.exists
    monkeypatch.setattr("nemo_kto.run.disk.os.open", lambda path, flags: opened.append(path) or real(path, flags))
    monkeypatch.setattr(Path, "exists", lambda path: tmp_path in opened and exists(path))
    _must_see(token, patience=20.0)  # UserError if it does not
    assert opened[-1] == token.parent


def on_two_machines(folders: list[Path], local_size: str = "1") -> str:
    state.init_distributed(layout=state.Layout(), seed=0)
    os.environ["LOCAL_WORLD_SIZE"] = local_size
    try:
        check_shared_folder(folders[state.rank()], patience=0.5)
    except UserError as error:
        return str(error)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    return ""


def test_a_run_folder_that_a_machine_does_not_see(ranks: RankPool, tmp_path: Path) -> None:
    own: list[Any] = [tmp_path / "shared", tmp_path / "own"]
    own[0].mkdir()
    assert ranks.run(2, on_two_machines, [own[0], own[0]]) == ["", ""]
    names = ("share", os.uname().nodename, f"{own[1]}", "exp_manager.explicit_log_dir")
    assert ranks.run(2, on_two_machines, own) == [Message(*names)] * 2
    assert ranks.run(2, on_two_machines, own, "") == [Message(*names)] * 2, "not known, as under srun"
    assert [*own[0].iterdir()] == [], "nothing is left"
