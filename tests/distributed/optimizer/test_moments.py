"""Adam's moments in bf16 take half the memory and disk space, and a resumed run is the same run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nemo_kto.architecture.parameters import rank_parameters
from nemo_kto.distributed import state
from nemo_kto.memory.rank_memory import Training
from nemo_kto.models.engine.optimizer import Bf16MomentsAdamW
from tests.distributed.optimizer import fused_adam
from tests.helpers import lora_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun

BF16, FP32 = torch.bfloat16, torch.float32


class Run(SavedRun):
    """A model in training, and its checkpoints."""

    def __init__(self, model: Path, folder: Path, moments: torch.dtype, dtype: torch.dtype) -> None:
        chunks, self.architecture = lora_jobs.build(model, state.Layout(), None, dtype=dtype)
        super().__init__(model, folder, chunks, lora_jobs.optimizer_of(chunks, dtype=dtype, moments_dtype=moments))

    @property
    def adam(self) -> Any:
        return self.optimizer.chained_optimizers[0].optimizer

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Main weight and moments of each piece."""
        main = [weight for group in self.adam.param_groups for weight in group["params"]]
        names = ("exp_avg", "exp_avg_sq")
        return [{"param": weight.detach(), **{name: self.adam.state[weight][name] for name in names}} for weight in main]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def narrow(model: Path, folder: Path, dtype: torch.dtype, has_engine: bool) -> dict[str, Any]:
    """What becomes of a run with moments in bf16, saved after two steps."""
    state.init_distributed(layout=state.Layout(), seed=3)
    with fused_adam.used() if has_engine else contextlib.nullcontext():
        run = Run(model, folder, BF16, dtype)
        run.steps(2)
        run.manager.save({"step": 2}, {})
        saved = [{name: kept.clone() for name, kept in of_one.items()} for of_one in run.states()]
        run.steps(2)
        again, wide, unsaved = (Run(model, folder, moments, dtype) for moments in (BF16, FP32, FP32))
        wide.load()
        widened = wide.states()
        with mock.patch.object(DistributedOptimizer, "_init_optimizer_states_with_dummy_values", side_effect=AssertionError):
            again.load()  # without gradients of zero, which would be another copy of the weights in fp32
        again.steps(2)
        unsaved.steps(4)
    planned = Training(
        architecture=run.architecture, element_bytes=dtype.itemsize, data_parallel=2, moment_bytes=2, micro_batch_tokens=1,
        micro_batch_width=1, micro_batches=1, logprob_chunk=1, on_gpu=True,
    )  # fmt: skip
    pairs = zip(run.states(), unsaved.states(), strict=True)
    moved = [float((mine["param"] - other["param"]).abs().max()) for mine, other in pairs]
    with_main = sum(kept.nbytes for of_one in saved for name, kept in of_one.items() if dtype == BF16 or name != "param")
    return {
        "class": type(run.adam),
        "types": sorted({(name, str(kept.dtype)) for of_one in saved for name, kept in of_one.items()}),
        "bytes": with_main,
        "planned": planned.share(rank_parameters(run.architecture)) * planned.state_bytes(),
        "same": same(run.weights(), again.weights()),
        "counts": {float(kept["step"]) for kept in again.adam.state.values()},
        "from_fp32": max(moved),
        "widened": all(
            kept.dtype == FP32 and torch.equal(kept, of_one[name].float())
            for of_one, of_wide in zip(saved, widened, strict=True)
            for name, kept in of_wide.items()
        ),
    }


def to_narrow(model: Path, folder: Path) -> bool:
    """Whether moments that were saved in fp32 are rounded when they are loaded."""
    state.init_distributed(layout=state.Layout(), seed=3)
    run = Run(model, folder, FP32, BF16)
    run.steps(2)
    run.manager.save({"step": 2}, {})
    after = Run(model, folder, BF16, BF16)
    after.load()
    pairs = zip(run.states(), after.states(), strict=True)
    return all(torch.equal(ours[name].to(kept.dtype), kept) for ours, theirs in pairs for name, kept in theirs.items())


@pytest.mark.parametrize(
    ("dtype", "has_engine"),
    [(BF16, False), *(pytest.param(*each, marks=pytest.mark.full) for each in ((BF16, True), (FP32, False), (FP32, True)))],
)
def test_a_run_with_moments_in_bf16(
    dtype: torch.dtype, has_engine: bool, ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    found = ranks.run(2, narrow, tiny_llama, tmp_path, dtype, has_engine)
    for of_rank in found:
        assert of_rank["class"] is Bf16MomentsAdamW
        assert of_rank["types"] == [
            ("exp_avg", "torch.bfloat16"),
            ("exp_avg_sq", "torch.bfloat16"),
            ("param", "torch.float32"),
        ]
        assert of_rank["same"], "a resumed run has the same steps"
        assert of_rank["counts"] == {4.0}
        assert of_rank["widened"], "bf16 to fp32 loses nothing"
        # four steps move a weight by at most 0.04; moments are rounded by up to 2**-9, the first one three times
        assert 0 < of_rank["from_fp32"] < 0.04 * 2**-7
    sizes = [of_rank["bytes"] for of_rank in found]
    assert abs(sum(sizes) - 2 * found[0]["planned"]) <= 0.01 * sum(sizes), "shared by two ranks"


def test_moments_in_fp32_are_rounded_to_bf16(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    assert ranks.run(2, to_narrow, tiny_llama, tmp_path) == [True, True]
