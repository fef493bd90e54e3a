"""Validation in whole runs: several sets, early stopping and samples, also after a resume."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.model_files.checkpoint_files import find_checkpoints
from nemo_kto.telemetry.evaluations import SAMPLES_FILE, Sample, read_samples
from tests.helpers.job_cache import JobCache
from tests.helpers.messages import Message, assert_names
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint, make_pairs, make_rows, write_rows
from tests.helpers.training_jobs import train, trajectory

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


STOPPING = "exp_manager.create_early_stopping_callback"
BY_AUC = "monitor: val_auc, mode: max"
STOPS_EARLY = [
    f"{STOPPING}=true",
    f"exp_manager.early_stopping_callback_params={{{BY_AUC}, min_delta: 9, patience: 2}}",  # no AUC improves by so much
    f"exp_manager.checkpoint_callback_params={{{BY_AUC}, save_top_k: 1}}",
    *("trainer.kto.val_check_interval=1", "trainer.kto.save_interval=99"),  # only the best and the last are saved
    *("trainer.kto.max_steps=4", "trainer.kto.log_every_n_steps=2", "export.enabled=true"),
    "trainer.kto.limit_val_batches=2",  # 32 rows: of fewer than 20 no checkpoint is called the best
]
WHY = ("val_auc", "9", "2", "step 1")


def printed(model: Path, rows: Path, folder: Path, overrides: list[str]) -> str:
    """On a rank: the output of the job."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train(model, rows, folder, 2, [*STOPS_EARLY, *overrides])
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


# Adapters with dropout, whose random numbers would be others if the samples drew any.
DROPOUT = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dropout=0.2", "model.reference.mode=adapter"]
FULL = ["model.peft.peft_scheme=none", "model.optim.sched.warmup_steps=0"]
LENGTH = ["trainer.kto.max_steps=2", "trainer.kto.val_check_interval=1", "trainer.kto.save_interval=1"]
SAMPLES = ["exp_manager.samples.count=2", "exp_manager.samples.max_new_tokens=4", "exp_manager.samples.temperature=0.7"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    message = {"role": "user", "content": "what is a lake?"}
    file.write_text(f"{json.dumps({'prompt': 'name a bird'})}\n{json.dumps({'messages': [message]})}\n")
    return file


@pytest.fixture
def whole(jobs: JobCache) -> list[Sample]:
    """Samples of a run on one rank."""
    return read_samples(jobs(overrides=[*LENGTH, *FULL, *SAMPLES]) / SAMPLES_FILE)


def taken(found: list[Sample]) -> list[tuple[int, str, int]]:
    return [(sample.step, sample.model, sample.index) for sample in found]


def test_training_is_the_same_to_the_last_bit(jobs: JobCache, prompts: Path) -> None:
    given = [*LENGTH, *DROPOUT]
    without = jobs(overrides=given)
    with_samples = jobs(overrides=[*given, *SAMPLES, f"exp_manager.samples.prompts={prompts}"])
    assert trajectory(with_samples) == trajectory(without)
    assert not (without / SAMPLES_FILE).exists()
    found = read_samples(with_samples / SAMPLES_FILE)
    expected = [(0, "reference"), (1, "policy"), (2, "policy")]
    assert taken(found) == [(step, model, index) for step, model in expected for index in range(4)]
    assert [sample.prompt for sample in found[2:4]] == ["name a bird", "what is a lake?"]
    assert [sample.messages for sample in found[2:4]] == [None, [{"role": "user", "content": "what is a lake?"}]]
    assert all(sample.tokens == 4 or sample.ended for sample in found)
    lines = [json.loads(line) for line in (with_samples / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("timing/samples", 0) > 0] == [1, 2]


def test_every_run_answers_two_prompts_before_and_after(jobs: JobCache) -> None:
    given = [*LENGTH, *DROPOUT]
    run = jobs(overrides=[*given, "exp_manager.samples.count=null"])
    assert trajectory(run) == trajectory(jobs(overrides=given))
    found = read_samples(run / SAMPLES_FILE)
    assert taken(found) == [(0, "reference", 0), (0, "reference", 1), (2, "policy", 0), (2, "policy", 1)]
    assert all(0 < sample.tokens <= 32 for sample in found)
    assert "timing/samples" not in (run / "metrics.jsonl").read_text()


def test_two_ranks_take_the_same_samples_and_a_resumed_run_repeats_none(
    jobs: JobCache, whole: list[Sample], tmp_path: Path
) -> None:
    given = [*LENGTH, *FULL, *SAMPLES, "model.tensor_model_parallel_size=2", "trainer.kto.max_epochs=1"]
    jobs.start(tmp_path, overrides=[*given, "trainer.kto.max_steps=1"], world_size=2)
    first = (tmp_path / SAMPLES_FILE).read_bytes()
    jobs.start(tmp_path, overrides=given, world_size=2)
    assert (tmp_path / SAMPLES_FILE).read_bytes().startswith(first)
    assert read_samples(tmp_path / SAMPLES_FILE) == whole


@pytest.mark.full
def test_samples_of_a_resumed_run_begin_with_those_of_the_reference(
    jobs: JobCache, whole: list[Sample], tmp_path: Path
) -> None:
    jobs.start(tmp_path, overrides=[*LENGTH, *FULL, "trainer.kto.max_steps=1"])
    jobs.start(tmp_path, overrides=[*LENGTH, *FULL, *SAMPLES])
    assert read_samples(tmp_path / SAMPLES_FILE) == [sample for sample in whole if sample.step != 1]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["swap", "cached"])
def test_another_reference_answers_with_its_own_weights(
    jobs: JobCache, tmp_path: Path, ranks: RankPool, kto_rows: Path, whole: list[Sample], mode: str
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=3, num_hidden_layers=2)
    named = [f"model.reference.restore_from_path={other}", f"model.reference.mode={mode}"]
    jobs.start(tmp_path / "named", overrides=[*LENGTH, *SAMPLES, *named, "trainer.kto.val_before_training=true"])
    found = read_samples(tmp_path / "named" / SAMPLES_FILE)
    expected = [(0, "reference"), (0, "policy"), (1, "policy"), (2, "policy")]
    assert taken(found) == [(step, model, index) for step, model in expected for index in range(2)]
    ranks.run(1, train, other, kto_rows, tmp_path / "run", 1, [*LENGTH, *SAMPLES, "trainer.kto.max_steps=1"])
    assert found[:2] == read_samples(tmp_path / "run" / SAMPLES_FILE)[:2]
    assert [sample.answer for sample in found[2:4]] == [sample.answer for sample in whole[:2]]
