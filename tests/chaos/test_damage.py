"""Damaged files are detected when they are read, never used, and repaired if possible."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from tests.chaos.job import Crash, Job, assert_resumes, files, run

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
ALL = ("launcher", "rank0", "rank1")
NEWEST, OLDER = "step_000004", "step_000003"  # the last one, and that of the validation at step 3


def cut(file: Path) -> None:
    """Half of it is left."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def flip(file: Path, place: int | None = None) -> None:
    """One bit in the middle, or at ``place``, is another."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def weights(folder: Path, name: str = NEWEST) -> Path:
    """The largest file of a checkpoint: tensors."""
    return max((folder / "run" / "checkpoints" / name / "state").rglob("*.distcp"), key=lambda file: file.stat().st_size)


def arrow(folder: Path) -> Path:
    """The tokenised training rows."""
    return max((folder / "cache").glob("*.arrow"), key=lambda file: file.stat().st_size)


def flip_token(file: Path) -> None:
    """The last token of the first prompt is another one."""
    with pyarrow.memory_map(str(file)) as source:
        prompts = pyarrow.ipc.open_stream(source).read_all()["prompt_ids"].combine_chunks()
        values = prompts.flatten().to_numpy(zero_copy_only=False)
        first = values[: len(prompts[0])].copy()
    place = file.read_bytes().index(first.tobytes())
    flip(file, place + first.nbytes - np.dtype(first.dtype).itemsize)


def only(pattern: str) -> Callable[[Path], Path]:
    """The first file of a case that fits."""
    return lambda folder: sorted(folder.glob(pattern))[0]


SWAP = ("model.reference.mode=swap",)
# Lost log-probs are computed again in the batches of another epoch, which round differently unless each sequence is alone.
CACHED = ("model.reference.mode=cached", "model.micro_batch_size=1", "model.data.share_prompts=false")
# Name: overrides of the job, the file, the damage, and the words that the next start must print.
Damage = tuple[tuple[str, ...], Callable[[Path], Path], Callable[[Path], object], tuple[str, ...]]
CASES: dict[str, Damage] = {
    "weights_cut": (SWAP, weights, cut, (NEWEST, "damaged")),
    "weights_flipped": (SWAP, weights, flip, (NEWEST, "damaged")),
    "rng_flipped": (SWAP, only(f"run/checkpoints/{NEWEST}/rng/*"), flip, (NEWEST, "damaged")),
    "info_cut": (SWAP, only(f"run/checkpoints/{NEWEST}/trainer.json"), cut, (NEWEST, "damaged")),
    "rows_cut": (SWAP, arrow, cut, ("arrow",)),
    "rows_flipped": (SWAP, arrow, flip_token, ("arrow",)),
    "reference_cut": (CACHED, only("cache/reference/*/part-*.npy"), cut, ("part-",)),
    "reference_flipped": (CACHED, only("cache/reference/*/part-*.npy"), flip, ("part-",)),
}


@pytest.fixture(scope="module")
def killed(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], Path], Job]:
    """Overrides, and a folder for a run with two checkpoints, killed in its sixth step."""
    known: dict[tuple[str, ...], Path] = {}

    def copy(overrides: tuple[str, ...], folder: Path) -> Job:
        own = replace(job, overrides=overrides)
        if overrides not in known:
            known[overrides] = tmp_path_factory.mktemp("killed")
            ended = run(own, known[overrides], crash=Crash(victims=ALL, point="optimizer", count=6))
            assert ended.fired, ended.output
        shutil.copytree(known[overrides], folder, dirs_exist_ok=True, symlinks=True)
        assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == [OLDER, NEWEST]
        return own

    return copy


@pytest.mark.parametrize("case", CASES)
def test_damage_is_detected_and_repaired(
    case: str, killed: Callable[[tuple[str, ...], Path], Job], whole: Callable[[Job], Path], tmp_path: Path
) -> None:
    overrides, find, damage, words = CASES[case]
    job = killed(overrides, tmp_path)
    damage(find(tmp_path))
    output = assert_resumes(job, tmp_path, whole(job)).output
    assert all(word in output for word in words), output


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_run_without_a_usable_checkpoint_does_not_start_over(
    damage: Callable[[Path], None], killed: Callable[[tuple[str, ...], Path], Job], tmp_path: Path
) -> None:
    job = killed(SWAP, tmp_path)
    for name in (OLDER, NEWEST):
        damage(weights(tmp_path, name))
    before = {name: content for name, content in files(tmp_path / "run").items() if not name.startswith(".lock")}
    again = run(job, tmp_path)
    assert (again.status, again.hung, again.left_running) == (2, False, []), again.output
    assert "Traceback" not in again.output
    assert str(tmp_path / "run") in again.last_lines
    after = files(tmp_path / "run")
    assert {name: after.get(name) for name in before} == before, "existing files are unchanged"
    assert [json.loads(line)["step"] for line in after["metrics.jsonl"].splitlines()][-1] == 5
