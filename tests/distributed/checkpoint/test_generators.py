"""Random generators are saved: a resumed run draws the same numbers as an uninterrupted one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_kto.checkpoint.model_state import get_rng_state, set_rng_state
from nemo_kto.checkpoint.safe_loading import load_plain
from nemo_kto.distributed import state
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train, trajectory

LORA_WITH_DROPOUT = [
    "model.tensor_model_parallel_size=2",
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.adapter_dropout=0.3",
]


def draws_before_and_after(file: Path) -> list[list[float]]:
    """Numbers drawn from every generator: after its state was saved to ``file``, again, and after it was restored."""
    state.init_distributed(layout=state.Layout(), seed=3)

    def draw() -> list[float]:
        tracked = []
        for name in sorted(get_cuda_rng_tracker().get_states()):
            with get_cuda_rng_tracker().fork(name):
                tracked.append(float(torch.rand(())))
        return [random.random(), float(np.random.rand()), float(torch.rand(())), *tracked]

    torch.save(get_rng_state(), file)
    saved, later = draw(), draw()
    set_rng_state(load_plain(file))
    return [saved, later, draw()]


def test_every_generator_is_restored(ranks: RankPool, tmp_path: Path) -> None:
    ((saved, later, restored),) = ranks.run(1, draws_before_and_after, tmp_path / "generators.pt")
    assert restored == saved
    assert len(saved) > 3, "megatron-core has further generators"
    assert all(before != after for before, after in zip(saved, later, strict=True))


def test_dropout_of_a_resumed_run(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    """Inputs of adapters are dropped by the generators that all ranks share, and by those of each tensor-parallel rank."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    overrides = [*LORA_WITH_DROPOUT, "trainer.kto.max_steps=3", "trainer.kto.val_check_interval=0"]
    overrides.append("trainer.kto.save_interval=2")
    ranks.run(2, train, tiny_llama, kto_rows, whole, 2, overrides)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000003")
    ranks.run(2, train, tiny_llama, kto_rows, resumed, 2, overrides)
    assert sorted(path.name for path in (resumed / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert len(trajectory(whole)) == 3
    assert trajectory(resumed) == trajectory(whole)
