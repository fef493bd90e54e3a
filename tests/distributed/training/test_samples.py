"""Samples of whole runs: when they are taken and by which model; training does not depend on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.telemetry.evaluations import SAMPLES_FILE, Sample, read_samples
from tests.helpers.job_cache import JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import train, trajectory

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
