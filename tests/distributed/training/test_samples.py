"""Samples of whole runs: when they are taken and by which model; training does not depend on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.telemetry.evaluations import SAMPLES_FILE, Sample, read_samples
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import train, trajectory

# Adapters with dropout, whose random numbers would be others if the samples drew any.
DROPOUT = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dropout=0.2", "model.reference.mode=adapter"]
FULL = ["model.peft.peft_scheme=none", "model.optim.sched.warmup_steps=0"]
EVERY_SECOND = ["trainer.kto.max_steps=4", "trainer.kto.val_check_interval=2", "trainer.kto.save_interval=2"]
SAMPLES = ["exp_manager.samples.count=2", "exp_manager.samples.max_new_tokens=5", "exp_manager.samples.temperature=0.7"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    message = {"role": "user", "content": "what is a lake?"}
    file.write_text(f"{json.dumps({'prompt': 'name a bird'})}\n{json.dumps({'messages': [message]})}\n")
    return file


@pytest.fixture(scope="module")
def start(
    ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Overrides, and the number of ranks -> the folder of the finished run."""

    def run(*overrides: str, world_size: int = 1, folder: Path | None = None) -> Path:
        folder = folder or tmp_path_factory.mktemp("run")
        ranks.run(world_size, train, tiny_llama, kto_rows, folder, world_size, [*EVERY_SECOND, *overrides])
        return folder

    return run


@pytest.fixture(scope="module")
def whole(start: Callable[..., Path]) -> list[Sample]:
    """Samples of a run of four steps on one rank."""
    return read_samples(start(*FULL, *SAMPLES) / SAMPLES_FILE)


def taken(found: list[Sample]) -> list[tuple[int, str, int]]:
    return [(sample.step, sample.model, sample.index) for sample in found]


def test_training_is_the_same_to_the_last_bit(start: Callable[..., Path], prompts: Path) -> None:
    without, with_samples = start(*DROPOUT), start(*DROPOUT, *SAMPLES, f"exp_manager.samples.prompts={prompts}")
    assert trajectory(with_samples) == trajectory(without)
    assert not (without / SAMPLES_FILE).exists()
    found = read_samples(with_samples / SAMPLES_FILE)
    expected = [(0, "reference"), (2, "policy"), (4, "policy")]
    assert taken(found) == [(step, model, index) for step, model in expected for index in range(4)]
    assert [sample.prompt for sample in found[2:4]] == ["name a bird", "what is a lake?"]
    assert [sample.messages for sample in found[2:4]] == [None, [{"role": "user", "content": "what is a lake?"}]]
    assert all(sample.tokens == 5 or sample.ended for sample in found)
    lines = [json.loads(line) for line in (with_samples / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("timing/samples", 0) > 0] == [2, 4]


def test_two_ranks_take_the_same_samples_and_a_resumed_run_repeats_none(
    start: Callable[..., Path], whole: list[Sample]
) -> None:
    layout = ["model.tensor_model_parallel_size=2", "trainer.kto.max_epochs=1"]
    other = start(*FULL, *SAMPLES, *layout, "trainer.kto.max_steps=2", world_size=2)
    first = (other / SAMPLES_FILE).read_bytes()
    start(*FULL, *SAMPLES, *layout, world_size=2, folder=other)
    assert (other / SAMPLES_FILE).read_bytes().startswith(first)
    assert read_samples(other / SAMPLES_FILE) == whole


@pytest.mark.full
def test_samples_of_a_resumed_run_begin_with_those_of_the_reference(start: Callable[..., Path], whole: list[Sample]) -> None:
    later = start(*FULL, "trainer.kto.max_steps=2")
    start(*FULL, *SAMPLES, folder=later)
    assert read_samples(later / SAMPLES_FILE) == [sample for sample in whole if sample.step != 2]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["swap", "cached"])
def test_another_reference_answers_with_its_own_weights(
    start: Callable[..., Path], tmp_path: Path, ranks: RankPool, kto_rows: Path, whole: list[Sample], mode: str
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=3)
    named = [f"model.reference.restore_from_path={other}", f"model.reference.mode={mode}"]
    found = read_samples(start(*SAMPLES, *named, "trainer.kto.val_before_training=true") / SAMPLES_FILE)
    expected = [(0, "reference"), (0, "policy"), (2, "policy"), (4, "policy")]
    assert taken(found) == [(step, model, index) for step, model in expected for index in range(2)]
    ranks.run(1, train, other, kto_rows, tmp_path / "run", 1, [*EVERY_SECOND, *SAMPLES, "trainer.kto.max_steps=1"])
    assert found[:2] == read_samples(tmp_path / "run" / SAMPLES_FILE)[:2]
    assert [sample.answer for sample in found[2:4]] == [sample.answer for sample in whole[:2]]
