"""Random generators are saved: a resumed run draws the same numbers as an uninterrupted one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_kto.checkpoint.safe_loading import load_plain
from nemo_kto.checkpoint.sharded_state import get_rng_state, set_rng_state
from nemo_kto.distributed import state
from tests.helpers.rank_pool import RankPool


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
