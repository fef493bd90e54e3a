"""A synced reference in a checkpoint: fp32 values, at any layout, and checkpoints with a reference in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed.state import Layout
from tests.helpers.rank_pool import RankPool

ADAPTERS = LoRASettings(rank=3, alpha=6, target_modules=("all",))


def moved(host: list[torch.Tensor]) -> list[torch.Tensor]:
    """Values that bf16 cannot hold, the same at every layout."""
    return [values.float() * (1 + 1 / 3 * 2**-9) for values in host]


def save_or_load(
    layout: Layout, model: Path, settings: LoRASettings | None, run: Path, save: bool, moves: bool
) -> dict[str, Any]:
    """On a rank: write a checkpoint with a moved reference, or load it over one that has not moved."""
    from nemo_kto.checkpoint.manager import newest_checkpoint
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.reference import SwappedWeights
    from tests.helpers import lora_jobs

    state.init_distributed(layout=layout, seed=3)
    chunks, _ = lora_jobs.build(model, layout, settings, dtype=torch.bfloat16)
    swapped = SwappedWeights(parameters=chunks[0].parameters(), moves=moves)
    optimizer = lora_jobs.optimizer_of(chunks, dtype=torch.bfloat16)
    manager = lora_jobs.manager_of(chunks, optimizer, run, model)
    manager.reference_weights = swapped
    expected = moved(swapped.kept)
    if save:
        for values, new in zip(swapped.values, expected, strict=True):
            values.copy_(new)
        lora_jobs.backward(chunks)
        optimizer.step()
        manager.save({"step": 1}, {})
        return {}
    newest = newest_checkpoint(run)
    assert newest is not None
    assert manager.load(newest) == {"step": 1}
    return {
        "dtypes": {str(values.dtype) for values in swapped.values},
        "exact": [torch.equal(*pair) for pair in zip(swapped.values, expected, strict=True)],
        "rounded": [torch.equal(*pair) for pair in zip(swapped.kept, [v.bfloat16() for v in expected], strict=True)],
        "of_bf16": [
            torch.equal(values, new.bfloat16().float()) for values, new in zip(swapped.values, expected, strict=True)
        ],
    }


@pytest.mark.parametrize(
    ("settings", "layout", "ranks_of_layout"),
    [
        pytest.param(None, Layout(tensor=2), 2, id="tp2", marks=pytest.mark.full),
        pytest.param(None, Layout(pipeline=2), 2, id="pp2", marks=pytest.mark.full),
        pytest.param(ADAPTERS, Layout(tensor=2), 2, id="adapters and another base, tp2"),
    ],
)
def test_fp32_values_are_restored_at_another_layout(
    settings: LoRASettings | None, layout: Layout, ranks_of_layout: int, ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    ranks.run(1, save_or_load, Layout(), tiny_llama, settings, tmp_path, True, True)
    for found in ranks.run(ranks_of_layout, save_or_load, layout, tiny_llama, settings, tmp_path, False, True):
        assert found["dtypes"] == {"torch.float32"}
        assert all(found["exact"])
        assert all(found["rounded"])


def test_a_checkpoint_with_a_reference_in_bf16_is_loaded(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    ranks.run(1, save_or_load, Layout(), tiny_llama, None, tmp_path, True, False)
    (found,) = ranks.run(1, save_or_load, Layout(), tiny_llama, None, tmp_path, False, True)
    assert found["dtypes"] == {"torch.float32"}
    assert all(found["of_bf16"])
