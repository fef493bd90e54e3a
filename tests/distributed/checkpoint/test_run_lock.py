"""A run folder used by another job is refused on every rank before anything is read or written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_kto.utils import locks
from nemo_kto.utils.locks import locked, owner_file, this_process
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train


def refusal(model: Path, rows: Path, folder: Path) -> str:
    from nemo_kto.errors import UserError

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "_GRACE_SECONDS", 0.1)
            train(model, rows, folder, 2, [])
    except UserError as error:
        return str(error)
    return "it was let in"


def half_done(folder: Path) -> dict[str, str]:
    """The contents of a run folder in the middle of a checkpoint."""
    files = {"metrics.jsonl": '{"step": 1}\n', "config.yaml": "a: 1\n"}
    files["checkpoints/.writing-step_000002/state/common.pt"] = "half"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return files


def test_a_second_job_is_refused_with_the_owner_of_the_folder(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    files = half_done(folder)

    def must_not_be_called(who: str) -> None:
        raise AssertionError(who)

    with locked(folder / ".lock", when_held=must_not_be_called):
        told = ranks.run(2, refusal, tmp_path / "no model", tmp_path / "no rows", folder)
    (since,) = {text.split(" since ")[1][:23] for text in told}
    keys = ("exp_manager.name", "exp_manager.explicit_log_dir")
    assert told == [Message(f"{folder}", f"{os.getpid()}", this_process().host, since, "folder", *keys)] * 2
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == files


def blocks(folder: Path) -> list[list[str]]:
    """Contents of the folder during and after each block."""
    from nemo_kto.distributed import state
    from nemo_kto.run.lifecycle import hold_run_folder

    found = []
    for writes in (False, True):
        with hold_run_folder(folder):
            if writes and state.is_rank_zero():
                (folder / "metrics.jsonl").touch()
            state.raise_together(None, "{}")  # waits for every rank, as the others below
            found.append(sorted(path.name for path in folder.iterdir()))
            state.raise_together(None, "{}")
        state.raise_together(None, "{}")
        found.append(sorted(path.name for path in folder.parent.iterdir()) if folder.parent.exists() else ["nothing"])
        state.raise_together(None, "{}")
    return found


def test_an_empty_run_folder_is_removed(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, blocks, tmp_path / "results" / "run")
    held = [".lock", ".lock.owner"]
    assert results == [[held, ["nothing"], [*held, "metrics.jsonl"], ["run"]]] * 2
    assert not owner_file(tmp_path / "results" / "run" / ".lock").exists()


def cleared(folder: Path) -> list[str]:
    """Contents of the locked folder."""
    from nemo_kto.run.lifecycle import hold_run_folder

    with hold_run_folder(folder):
        return sorted(path.name for path in folder.iterdir())


def test_partial_files_of_killed_jobs_are_removed(ranks: RankPool, tmp_path: Path) -> None:
    for name in (f".config.yaml-{'a0' * 16}", ".config.yaml-mine", "metrics.jsonl", f".{'b' * 32}"):
        (tmp_path / name).touch()
    assert ranks.run(1, cleared, tmp_path) == [
        [f".{'b' * 32}", ".config.yaml-mine", ".lock", ".lock.owner", "metrics.jsonl"]
    ]
