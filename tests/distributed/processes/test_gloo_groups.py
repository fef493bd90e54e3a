"""Runs on GPUs do not create megatron-core's gloo groups; the same runs on CPU ranks show that none is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nemo_kto.device import device
from nemo_kto.distributed import state
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train, trajectory

SAVING = [
    "trainer.kto.save_interval=2",
    "exp_manager.checkpoint_callback_params.save_top_k=1",
    "trainer.kto.limit_val_batches=0",
]


def groups_of_a_run(model: Path, rows: Path, folder: Path, groups: bool | None, overrides: list[str]) -> list[str | None]:
    """On a rank: train, resume from the last checkpoint, and give the backends of the groups that were made."""
    backends: list[str | None] = []
    new_group = dist.new_group

    def recorded(*arguments: Any, **options: Any) -> Any:
        backends.append(options.get("backend"))
        return new_group(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded)
        if groups is not None:
            patch.setattr(state, "uses_gloo_groups", lambda: groups)
        train(model, rows, folder, 2, [*SAVING, *overrides])
    return backends


def test_a_run_without_gloo_groups_is_the_same(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    made = ranks.run(2, groups_of_a_run, tiny_llama, kto_rows, tmp_path / "with", None, [])
    none = ranks.run(2, groups_of_a_run, tiny_llama, kto_rows, tmp_path / "without", False, ["trainer.kto.max_steps=4"])
    none += ranks.run(2, groups_of_a_run, tiny_llama, kto_rows, tmp_path / "without", False, [])
    assert all("gloo" in backends for backends in made), "CPU runs keep them"
    assert not any("gloo" in backends for backends in none)
    assert trajectory(tmp_path / "without") == trajectory(tmp_path / "with")


def test_where_gloo_groups_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.uses_gloo_groups()
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    assert not state.uses_gloo_groups()
