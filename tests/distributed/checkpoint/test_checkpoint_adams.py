"""Resuming with another Adam implementation: torch's Adam stores its step count differently from fused ones."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from nemo_kto.distributed import state
from tests.distributed.optimizer import fused_adam
from tests.helpers import lora_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun

# name: type of the weights, whether the optimizer is distributed
FORMS = {
    "fp32": (torch.float32, False),
    "bf16_with_main_weights": (torch.bfloat16, False),
    "fp32_distributed": (torch.float32, True),
    "bf16_distributed": (torch.bfloat16, True),
}
CHANGES = {"torch_to_fused": (False, True), "fused_to_torch": (True, False), "fused": (True, True)}


class Run(SavedRun):
    """A model in training, and its checkpoints."""

    def __init__(self, model: Path, folder: Path, form: str, *, fused: bool) -> None:
        dtype, distributed = FORMS[form]
        with fused_adam.used() if fused else contextlib.nullcontext():
            chunks, _ = lora_jobs.build(model, state.Layout(), None, distributed=distributed, dtype=dtype)
            optimizer = lora_jobs.optimizer_of(chunks, distributed=distributed, dtype=dtype)
        super().__init__(model, folder, chunks, optimizer)
        self.fused = fused

    def save(self) -> None:
        with fused_adam.used() if self.fused else contextlib.nullcontext():
            self.manager.save({"step": 2}, {})

    def load(self) -> None:
        with fused_adam.used() if self.fused else contextlib.nullcontext():
            super().load()

    def counts(self) -> list[float]:
        """What Adam has counted, wherever it does."""
        (part,) = self.optimizer.chained_optimizers
        assert isinstance(part.optimizer, fused_adam.FusedAdam) is self.fused
        counted = part.optimizer.param_groups if self.fused else part.optimizer.state.values()
        return sorted({float(kept["step"]) for kept in counted})


def resumed(model: Path, folder: Path, form: str) -> dict[str, tuple[float, list[float]]]:
    """For each change, the largest difference to a run that nothing stopped, and what Adam has counted."""
    state.init_distributed(layout=state.Layout(), seed=3)
    saved = {fused: Run(model, folder / str(fused), form, fused=fused) for fused in (False, True)}
    for run in saved.values():
        run.steps(2)
        run.save()
    saved[False].steps(2)
    found = {}
    for change, (before, after) in CHANGES.items():
        run = Run(model, folder / str(before), form, fused=after)
        run.load()
        run.steps(2)
        pairs = zip(run.weights(), saved[False].weights(), strict=True)
        found[change] = (max(float((mine - other).abs().max()) for mine, other in pairs), run.counts())
    return found


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.full] * (form != "bf16_distributed")) for form in FORMS]
)
def test_steps_continue_as_without_interruption(form: str, ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    (found,) = ranks.run(1, resumed, tiny_llama, tmp_path, form)
    assert found.keys() == CHANGES.keys()
    for change, (difference, counts) in found.items():
        assert counts == [4.0], change
        assert difference < 1e-6, f"{change}: weights of about 1, which each step moves by about 0.01"
