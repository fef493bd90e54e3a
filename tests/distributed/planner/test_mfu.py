"""Logged model FLOPs utilisation: the number of passes per step. Layouts are compared in test_layouts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import training_jobs
from tests.helpers.rank_pool import RankPool

LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]


@pytest.mark.parametrize("name", [pytest.param("dpo", marks=pytest.mark.full), "kto"])
def test_flops_of_a_step(
    name: str, ranks: RankPool, tiny_llama: Path, kto_rows: Path, dpo_rows: Path, tmp_path: Path
) -> None:
    rows = {"kto": kto_rows, "dpo": dpo_rows}[name]

    def flops(case: str, world_size: int, *overrides: str) -> float:
        short = [f"trainer.{name}.max_steps=1", f"trainer.{name}.limit_val_batches=0", *overrides]
        short.append(f"model.data.cache_dir={tmp_path / 'cache'}")
        arguments = (tiny_llama, rows, tmp_path / case, world_size, short, name)
        ranks.run(world_size, training_jobs.train_with_known_peak, *arguments)
        (step,) = training_jobs.flops(tmp_path / case, world_size)
        return step

    swap = flops("swap", 1)
    cached = flops("cached", 1, "model.reference.mode=cached")
    lora, lora_cached = (flops(f"lora-{mode}", 1, *LORA, f"model.reference.mode={mode}") for mode in ("adapter", "cached"))
    # the reference is the model itself, swapped or without its adapters
    assert lora - lora_cached == pytest.approx(swap - cached, rel=1e-9)
    if name == "dpo":  # one pass of the reference, one forward, and two for the backward pass
        samples, kl_examples = cached / 3, 0.0
        assert swap == pytest.approx(4 * samples, rel=1e-9)
        # one more, by which the values are sorted
        assert flops("aot", 1, "model.dpo.preference_loss=aot") == pytest.approx(5 * samples, rel=1e-9)
    else:  # with samples S and KL examples K: 4 S + 2 K, 3 S + K
        samples = flops("apo_zero_unpaired", 1, "model.kto.preference_loss=apo_zero_unpaired") / 4
        kl_examples = cached - 3 * samples
        assert 0.9 < kl_examples / samples < 1.1, "responses of about the same lengths"
        assert swap == pytest.approx(4 * samples + 2 * kl_examples, rel=1e-9)
        # one more, by which delta is found
        assert flops("bco", 1, "model.kto.preference_loss=bco") == pytest.approx(5 * samples, rel=1e-9)
    # frozen weights have no gradient; how much that is, test_flops.py compares with torch's count
    assert 2.0 < (lora_cached - kl_examples) / samples < 2.5
