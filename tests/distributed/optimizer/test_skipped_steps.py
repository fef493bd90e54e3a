"""A step that is not finite on one rank is skipped by all; only the schedule and the data advance."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers import training_jobs
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool

SPOILT = 2  # steps from this one on, two by default


def state_of(trainer: Any) -> list[torch.Tensor]:
    """Weights, moments and step counters of this rank."""
    kept = [weight.detach().clone() for chunk in trainer.model.engine.chunks for weight in chunk.parameters()]
    for part in trainer.optimizer.chained_optimizers:
        for values in part.optimizer.state_dict()["state"].values():
            kept += [torch.as_tensor(value).clone() for value in values.values()]
        kept += [torch.as_tensor(group.get("step", 0)) for group in part.optimizer.param_groups]
    return kept


def spoilt_job(
    model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str], what: str, rank: int, steps: int
) -> tuple[list[bool], str]:
    """Train with non-finite numbers on one rank in some steps: whether each step changed this rank, and the error."""
    from megatron.core.optimizer import ChainedOptimizer

    from nemo_kto.algorithms.dpo import DPOTrainer
    from nemo_kto.distributed import state
    from nemo_kto.errors import UserError
    from nemo_kto.models.engine.engine import LogProbEngine
    from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel

    note, step = LogProbEngine._note_gradients, DPOTrainer._optimizer_step
    loss, norm = MegatronGPTKTOModel._micro_batch_loss, ChainedOptimizer.get_grad_norm
    changed: list[bool] = []

    def is_bad(kind: str) -> bool:
        return kind == what and state.rank() == rank and SPOILT <= len(changed) + 1 < SPOILT + steps

    def spoil_gradient(engine: LogProbEngine, group: Any, **options: bool) -> None:
        if is_bad("gradient"):
            group.buckets[-1].grad_data[7] = torch.nan
        note(engine, group, **options)

    def spoil_loss(*arguments: Any, **options: Any) -> Any:
        result = loss(*arguments, **options)
        if not is_bad("loss"):
            return result
        sums = {name: total + torch.inf if "loss_sum" in name else total for name, total in result.report.sums.items()}
        report = result.report._replace(sums=sums)
        return result._replace(loss_sum=result.loss_sum + torch.inf, report=report)

    def spoil_norm(optimizer: ChainedOptimizer) -> float:
        spoils = what == "norm" and SPOILT <= len(changed) + 1 < SPOILT + steps
        return math.inf if spoils else norm(optimizer)

    def watch(trainer: DPOTrainer, *arguments: Any) -> Any:
        before = state_of(trainer)
        result = step(trainer, *arguments)
        after = state_of(trainer)
        # the first step makes the moments
        changed.append(len(before) != len(after) or not all(map(torch.equal, before, after)))
        return result

    with (
        mock.patch.object(LogProbEngine, "_note_gradients", spoil_gradient),
        mock.patch.object(MegatronGPTKTOModel, "_micro_batch_loss", spoil_loss),
        mock.patch.object(ChainedOptimizer, "get_grad_norm", spoil_norm),
        mock.patch.object(DPOTrainer, "_optimizer_step", watch),
    ):
        try:
            training_jobs.train(model, rows, folder, world_size, overrides)
        except UserError as error:
            return changed, str(error)
    return changed, ""


def steps_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/lr" in line]


LAYOUTS = {
    "dp2, bf16, distributed optimizer": (2, ["trainer.precision=bf16-forced"]),
    "dp2, fp32": (2, ["model.optim.use_distributed_optimizer=false"]),
    "dp2, bf16": (2, ["trainer.precision=bf16-forced", "model.optim.use_distributed_optimizer=false"]),
    "tp2, fp32, adapters": (2, ["model.tensor_model_parallel_size=2", "model.peft.peft_scheme=lora"]),
    "tp2, sequence parallel": (2, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
    "pp2, fp32": (2, ["model.pipeline_model_parallel_size=2", "model.optim.use_distributed_optimizer=false"]),
    "tp2, pp2, bf16": (
        4,
        ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2", "trainer.precision=bf16-forced"],
    ),
}
QUICK = (("dp2, fp32", "norm"),)
CASES = [
    pytest.param(name, what, id=f"{name}, {what}", marks=() if (name, what) in QUICK else pytest.mark.full)
    for name in LAYOUTS
    for what in ("gradient", "loss", "norm")  # the norm overflows where no rank's own gradient does
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_all_ranks_skip_a_step_together(
    name: str, what: str, ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    world_size, layout = LAYOUTS[name]
    results = ranks.run(world_size, spoilt_job, tiny_llama, kto_rows, tmp_path, world_size, layout, what, world_size - 1, 2)
    assert results == [([True, False, False, True, True], "")] * world_size
    steps = steps_of(tmp_path)
    assert [step["train/skipped_steps"] for step in steps] == [0, 1, 2, 2, 2]
    assert [step["train/lr"] for step in steps] == pytest.approx([2.5e-4, *[5e-4] * 4])
    assert [step["train/consumed_samples"] for step in steps] == [16, 32, 48, 64, 80]
    assert [step.get("train/grad_norm") is None for step in steps] == [False, True, True, False, False]
    # the first rank, which logs, has the loss of another rank that shares its layers only if that goes through the pipeline
    known = what == "loss" and not name.startswith("tp2")
    assert [step["train/loss"] is None for step in steps] == [False, known, known, False, False]


def test_too_many_skipped_steps_end_the_run_and_keep_the_last_checkpoint(
    ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    arguments = (tiny_llama, kto_rows, tmp_path, 2, ["trainer.kto.save_interval=1"], "gradient", 1, 9)
    results = ranks.run(2, spoilt_job, *arguments)
    assert [changed for changed, _ in results] == [[True, False, False]] * 2
    (error,) = {error for _, error in results}
    begin, rows, skipped, last, remedy = error.split("; ")
    assert begin == Message("4", "1")
    named, more = rows.partition(": ")[2].split(" and ")
    lines = [int(row.removeprefix(f"{kto_rows}:")) for row in named.split(", ")]
    assert (len(set(lines)), more) == (8, "8 more")
    assert set(lines) <= set(range(1, 97))
    assert skipped == Message("3", "trainer.max_skipped_steps=3")
    assert last == f"last good checkpoint: {tmp_path / 'checkpoints/step_000003'}"
    assert remedy == Message("model.optim.lr")
    info = json.loads((tmp_path / "checkpoints/step_000003/trainer.json").read_text())
    assert (info["trainer"]["skipped_steps"], info["trainer"]["skipped_in_a_row"]) == (2, 2)
