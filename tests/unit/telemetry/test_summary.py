"""The complete tables at the start and the end of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.telemetry.summary import RunEnd, RunStart, SplitRows, adapter_lines, figures_of, model_lines, short
from nemo_kto.telemetry.timers import duration_text
from tests.helpers.messages import Message

START = RunStart(
    command="nemo-kto kto",
    model="models/small",
    family="llama",
    parameters=134_515_008,
    adapters=None,
    trained=134_515_008,
    splits={
        "train": SplitRows(
            unit="rows",
            rows=12_000,
            classes={"desirable": 7_000, "undesirable": 5_000},
            tokens=3_400_000,
            cut_prompts=12,
            cut_responses=0,
        ),
        "validation": SplitRows(unit="rows", rows=400),
    },
    steps=375,
    steps_per_epoch=187,
    resumed_step=None,
    global_batch=64,
    micro_batch="4",
    seq_length="at most 256 tokens (max_position_embeddings of the model)",
    context_parallel=1,
    data_parallel=1,
    tensor_parallel=1,
    pipeline_parallel=1,
    stages="",
    sequence_parallel=False,
    device="NVIDIA H200",
    precision="bf16 (why)",
    reference="cached (it does not change)",
    folder="results/gpt_kto",
)
END = RunEnd(
    command="nemo-kto kto",
    step=375,
    steps=375,
    steps_per_epoch=375,
    seconds=725.0,
    stopped_by=None,
    reached={"train loss": "0.5000 -> 0.4000 (steps 1 and 375)"},
    best="results/gpt_kto/checkpoints/step_000300 (val_loss 0.4100)",
    exports=model_lines(Path("results/gpt_kto/hf"), "step 375"),
    train_longer="trainer.kto.max_epochs=2",
    metrics="results/gpt_kto/metrics.jsonl",
)


def test_the_start_table() -> None:
    assert str(START).splitlines() == [
        Message("nemo-kto kto"),
        Message("model", "models/small", "llama", "135 M"),
        Message("adapters", "none"),
        Message("train", "12,000 rows", "7,000 desirable", "5,000 undesirable", "3,400,000 tokens", "12 prompts"),
        Message("validation", "400 rows"),
        Message("steps", "375", "2.01 epochs", "187 steps"),
        Message("64", "4"),
        Message("sequences", "256", "max_position_embeddings"),
        Message("layout", "1 rank"),
        Message("device", "NVIDIA H200"),
        Message("bf16 (why)"),
        Message("reference", "cached (it does not change)"),
        Message("run folder", "results/gpt_kto"),
    ]


def test_the_layout_line_of_a_mixture_of_experts() -> None:
    start = replace(START, data_parallel=8, pipeline_parallel=2, expert_parallel=4)
    assert str(start).splitlines()[8] == Message("layout", "16 ranks", "8 data x 1 tensor x 2 pipeline", "experts over 4")


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        ({}, "5 pairs"),
        ({"tokens": 70}, "5 pairs, 70 tokens"),
        ({"cut_prompts": 0, "cut_responses": 0}, "5 pairs, none truncated"),
        ({"cut_prompts": 2, "cut_responses": 1}, "5 pairs, 2 prompts and 1 responses truncated"),
    ],
)
def test_rows_of_a_split(cut: dict[str, Any], text: str) -> None:
    assert str(SplitRows(unit="pairs", rows=5, **cut)) == text


def test_the_start_table_of_many_ranks_with_resumed_adapters() -> None:
    start = replace(
        START,
        adapters="LoRA of rank 16, alpha 32, on q_proj, v_proj",
        trained=921_600,
        resumed_step=187,
        steps=187,
        data_parallel=2,
        tensor_parallel=4,
        sequence_parallel=True,
    )
    lines = str(start).splitlines()
    assert lines[1:3] == [
        Message("models/small", "135 M", "921,600", "adapters"),
        Message("adapters", "LoRA of rank 16, alpha 32, on q_proj, v_proj"),
    ]
    assert lines[5] == Message("187", "1")
    assert lines[8] == Message("layout", "8 ranks", "2 data x 4 tensor x 1 pipeline", "sequence parallel")
    shared = str(replace(start, context_parallel=2)).splitlines()
    assert shared[8] == Message("16 ranks", "2 data x 2 context x 4 tensor x 1 pipeline", "sequence parallel")
    staged = replace(start, pipeline_parallel=2, tensor_parallel=1, stages="2 chunks", sequence_parallel=False)
    assert str(staged).splitlines()[8] == Message("4 ranks", "2 data x 1 tensor x 2 pipeline", "2 chunks")


def test_the_start_table_with_missing_kernels() -> None:
    lines = str(replace(START, slow_paths=["no apex; install it", "no gcc"])).splitlines()
    assert lines[-3:] == [
        Message("results/gpt_kto"),
        Message("1", "no apex; install it"),
        Message("2", "no gcc"),
    ]


def test_the_end_table() -> None:
    assert str(END).splitlines() == [
        Message("nemo-kto kto", "step 375 of 375", "1 epoch of 375 steps", "12 min"),
        Message("train loss", "0.5000 -> 0.4000 (steps 1 and 375)"),
        Message("best", "results/gpt_kto/checkpoints/step_000300 (val_loss 0.4100)"),
        Message("results/gpt_kto/hf", "step 375"),
        Message('transformers.AutoModelForCausalLM.from_pretrained("results/gpt_kto/hf")'),
        Message("train", "trainer.kto.max_epochs=2"),
        Message("metrics", "results/gpt_kto/metrics.jsonl"),
    ]


def test_the_end_table_of_a_run_that_reached_max_time() -> None:
    end = replace(
        END, step=75, stopped_by="trainer.max_time=00:03:00:00", exports=adapter_lines(Path("adapter")), train_longer=""
    )
    lines = str(end).splitlines()
    assert lines[0] == Message("trainer.max_time=00:03:00:00", "step 75 of 375", "0.2 epochs of 375 steps", "12 min")
    assert lines[3:6] == [
        Message("exported adapters", "adapter"),
        Message('peft.AutoPeftModelForCausalLM.from_pretrained("adapter")'),
        Message("command", "resume"),
    ]


def test_the_end_table_after_early_stopping() -> None:
    why = "val_loss was 0.4100 at step 300"
    end = replace(END, step=360, early_stopping=why, train_longer="exp_manager.create_early_stopping_callback=false")
    lines = str(end).splitlines()
    assert lines[0] == Message("early stopping", "step 360 of 375", "0.96 epochs of 375 steps", "12 min")
    assert lines[1] == Message("early stopping", why)
    assert lines[-2] == Message("train", "exp_manager.create_early_stopping_callback=false")


def test_first_and_last_values(tmp_path: Path) -> None:
    logged = [
        {"step": 0, "val/loss": 0.5},
        {"step": 1, "train/loss": 0.5, "train/kl": 0.0},
        {"step": 2, "train/loss": 0.45},
        {"step": 2, "val/loss": 0.25, "val/rewards_margin": 1.5, "val/kl": None},
        {"step": 2, "timing/checkpoint": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in logged))
    expected = {
        "train loss": "0.5000 -> 0.4500 (steps 1 and 2)",
        "validation loss": "0.5000 -> 0.2500 (steps 0 and 2)",
        "validation margin": "1.5000 (step 2)",
    }
    assert figures_of(file) == expected
    file.write_bytes(file.read_bytes() + b'[]\n\xff\0\n{"step": 3, "train/lo')  # of a disk that is full
    assert figures_of(file) == expected
    file.unlink()
    assert figures_of(file) == {}


def test_first_and_last_values_of_each_validation_set(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    logged = [{"step": step, "val/a_loss": 1 / step, "val/a_sft_loss": 9.0, "val/b_kl": 0.5} for step in (1, 4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in logged))
    assert figures_of(file, validations={"validation a": "val/a_", "validation b": "val/b_"}) == {
        "validation a loss": "1.0000 -> 0.2500 (steps 1 and 4)",
        "validation b kl": "0.5000 -> 0.5000 (steps 1 and 4)",
    }


@pytest.mark.parametrize(
    ("number", "text"),
    [(999_999, "999,999"), (1_000_000, "1.00 M"), (13_450_000, "13.4 M"), (134_515_008, "135 M"), (7_615_616_512, "7.62 B")],
)
def test_large_numbers(number: int, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01, "1 s"), (89.0, "89 s"), (90.0, "2 min"), (725.0, "12 min"), (5400.0, "1.5 h"), (1e6, "277.8 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
