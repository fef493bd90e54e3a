"""Runs on GPUs do not create megatron-core's gloo groups; the same runs on CPU ranks show that none is used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nemo_kto.device import device
from nemo_kto.distributed import state
from tests.helpers.consumed_rows import train_and_record
from tests.helpers.job_cache import CHECKPOINTS, JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import shards, train, trajectory


def groups_of_a_run(*arguments: Any) -> list[str | None]:
    """Backends of the groups that a run without gloo groups makes."""
    backends: list[str | None] = []
    new_group = dist.new_group

    def recorded(*arguments: Any, **options: Any) -> Any:
        backends.append(options.get("backend"))
        return new_group(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded)
        patch.setattr(state, "uses_gloo_groups", lambda: False)
        train(*arguments)
    return backends


def test_a_run_without_gloo_groups_is_the_same(
    jobs: JobCache, ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    """It loads a checkpoint of a run that has them, and saves others."""
    whole, run = jobs("kto", overrides=CHECKPOINTS, world_size=2, run=train_and_record), tmp_path / "run"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("step_000002", "step_000003"))
    made = ranks.run(2, groups_of_a_run, tiny_llama, kto_rows, run, 2, list(CHECKPOINTS))
    assert all(backends and "gloo" not in backends for backends in made)
    assert trajectory(run) == trajectory(whole)
    assert len(shards(run, step=3)) == 2
    assert shards(run, step=3) == shards(whole, step=3)


def test_where_gloo_groups_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.uses_gloo_groups()
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    assert not state.uses_gloo_groups()
