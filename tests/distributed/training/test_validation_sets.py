"""Several validation sets in one run: metrics of separate runs, loader workers, resuming."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.model_files.checkpoint_files import find_checkpoints
from tests.helpers.job_cache import JobCache
from tests.helpers.messages import assert_names
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows
from tests.helpers.training_jobs import train

MONITOR = "exp_manager.checkpoint_callback_params.monitor"
STEPS = ["trainer.{}.max_steps=2", "trainer.{}.val_check_interval=1", "trainer.{}.limit_val_batches=1.0"]
# Steps that are large, and a reference whose log-probs must all have been computed before.
SETTINGS = [
    "model.optim.lr=5e-3",
    "model.optim.sched.warmup_steps=0",
    "model.reference.mode=cached",
    f"{MONITOR}=train_loss",
]
WORKERS = "model.data.num_workers=1"


def files_of(folder: Path, algorithm: str) -> dict[str, Path]:
    """Training rows, and two sets of other sizes; the last batch of each is not full."""
    make = make_rows if algorithm == "kto" else make_pairs
    sizes = {"train": (32, 0), "helpful": (22, 1), "harmless": (37, 2)}
    return {name: write_rows(folder / f"{name}.jsonl", make(count, seed=seed)) for name, (count, seed) in sizes.items()}


def prefix(files: dict[str, Path], validation: str) -> str:
    return f"model.data.data_prefix={{train: {files['train']}, validation: {validation}}}"


def both(files: dict[str, Path]) -> str:
    return f"{{helpful: {files['helpful']}, harmless: {files['harmless']}}}"


def validations(
    jobs: JobCache,
    files: dict[str, Path],
    folder: Path,
    algorithm: str,
    *overrides: str,
    size: int = 1,
    job: Callable[..., None] = train,
) -> list[dict[str, float]]:
    """The metrics of each validation of a job."""
    given = [*(text.format(algorithm) for text in STEPS), *SETTINGS, prefix(files, both(files)), *overrides]
    jobs.start(folder, algorithm, overrides=given, world_size=size, run=job)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [{name: value for name, value in line.items() if name.startswith("val/")} for line in logged]
    return [values for values in found if values]


@pytest.mark.parametrize("algorithm", ["kto", pytest.param("dpo", marks=pytest.mark.full)])
def test_the_metrics_are_those_of_separate_runs(algorithm: str, jobs: JobCache, tmp_path: Path) -> None:
    files = files_of(tmp_path, algorithm)
    once = f"trainer.{algorithm}.max_steps=1"
    (found,) = validations(jobs, files, tmp_path / "both", algorithm, once)
    expected: dict[str, float] = {}
    for name in ("helpful", "harmless"):
        only = prefix(files, str(files[name]))
        (alone,) = validations(jobs, files, tmp_path / name, algorithm, only, once)
        expected |= {key.replace("val/", f"val/{name}_"): value for key, value in alone.items()}
    assert found == expected
    assert [found[f"val/{name}_rows"] for name in ("helpful", "harmless")] == [22, 37]
    assert abs(found["val/helpful_loss"] - found["val/harmless_loss"]) > 1e-3, "or equality proves nothing"


def train_with_forked_workers(*arguments: Any) -> None:
    """On a rank: a job whose loaders start processes as they do outside of this pool, where new interpreters would start."""
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        train(*arguments)
    finally:
        multiprocessing.set_start_method(method, force=True)


@pytest.mark.full
@pytest.mark.parametrize(("algorithm", "size"), [("kto", 2), ("dpo", 1)])
def test_loader_workers_change_no_number(algorithm: str, size: int, jobs: JobCache, tmp_path: Path) -> None:
    """Each set has separate worker processes, kept from one validation to the next."""
    files = files_of(tmp_path, algorithm)
    alone = validations(jobs, files, tmp_path / "alone", algorithm, size=size)
    assert len(alone) == 2
    job = train_with_forked_workers
    assert validations(jobs, files, tmp_path / "workers", algorithm, WORKERS, size=size, job=job) == alone


def resumed(model: Path, rows: Path, folder: Path, overrides: list[str]) -> str:
    """On a rank: why the run is not resumed."""
    try:
        train(model, rows, folder, 1, overrides)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_a_resumed_run_has_the_same_validation_sets(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    files, folder = files_of(tmp_path, "kto"), tmp_path / "run"
    given = [*SETTINGS, "trainer.kto.limit_val_batches=1", "trainer.kto.save_interval=1"]

    def again(validation: str, steps: int) -> str:
        words = [*given, prefix(files, validation), f"trainer.kto.max_steps={steps}"]
        return ranks.run(1, resumed, tiny_llama, files["train"], folder, words)[0]

    helpful, harmless = (f"{name}: {files[name]}" for name in ("helpful", "harmless"))
    assert again(f"{{{helpful}, {harmless}}}", 1) == ""
    keys = ("model.data.data_prefix", "splits_string", "validation rows")
    before = "37 rows in harmless, 22 rows in helpful"
    others = {
        f"{{helpful: {files['harmless']}, harmless: {files['helpful']}}}": (
            f"22 rows in harmless, 37 rows in helpful; then {before}"
        ),
        f"{{{helpful}, safe: {files['harmless']}}}": f"22 rows in helpful, 37 rows in safe; then {before}",
    }
    for validation, part in others.items():
        assert_names(again(validation, 2), *keys, f"({part})")
    assert again(f"{{{harmless}, {helpful}}}", 2) == "", "in another order"
    assert [checkpoint.step for checkpoint in find_checkpoints(folder / "checkpoints")][-1] == 2
