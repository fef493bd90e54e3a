"""Adam's moments and sums of gradients in bf16: half the memory, the same up to rounding, and the same resumed run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model

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


class NarrowRun(SavedRun):
    """A model in bf16 in training, and its checkpoints."""

    def __init__(self, model: Path, folder: Path, reduce_in_fp32: bool) -> None:
        chunks, _ = lora_jobs.build(model, state.Layout(), dtype=BF16, reduce_in_fp32=reduce_in_fp32)
        super().__init__(model, folder, chunks, lora_jobs.optimizer_of(chunks, dtype=BF16))


def gradients(model: Path, *, reduce_in_fp32: bool) -> dict[str, torch.Tensor]:
    """The gradient of each weight, summed over the texts of all ranks."""
    chunks, _ = lora_jobs.build(model, state.Layout(), dtype=BF16, distributed=False, reduce_in_fp32=reduce_in_fp32)
    lora_jobs.backward(chunks)
    linears = [each for each in chunks[0].modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    added = [each.gradient_accumulation_fusion for each in linears if each.weight is not None]
    assert set(added) == {not reduce_in_fp32}, "a CPU multiplies bf16 matrices into sums in bf16, not in fp32"
    return {name: weight.main_grad.clone() for name, weight in unwrap_model(chunks[0]).named_parameters()}


def compared(model: Path, folder: Path) -> dict[str, Any]:
    state.init_distributed(layout=state.Layout(), seed=3)
    wide, narrow = (gradients(model, reduce_in_fp32=wide) for wide in (True, False))
    errors = {name: float((narrow[name].float() - wide[name]).norm() / wide[name].norm()) for name in wide}
    run = NarrowRun(model, folder, False)
    norms = run.steps(2)
    run.manager.save({"step": 2}, {})
    again = [NarrowRun(model, folder, reduce_in_fp32) for reduce_in_fp32 in (False, True)]
    for each in again:
        each.load()
    loaded = [all(torch.equal(*pair) for pair in zip(run.weights(), each.weights(), strict=True)) for each in again]
    further = [each.steps(1)[0] for each in (run, *again)]
    same = all(torch.equal(*pair) for pair in zip(run.weights(), again[0].weights(), strict=True))
    return {
        "types": {str(grad.dtype) for grad in narrow.values()},
        "errors": errors,
        "norms": [*norms, *further],
        "wide norms": NarrowRun(model, folder, True).steps(3),
        "loaded": loaded,
        "same": same,
    }


def test_gradients_in_bf16(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    for found in ranks.run(2, compared, tiny_llama, tmp_path):
        assert found["types"] == {"torch.bfloat16"}
        assert 1e-4 < max(found["errors"].values()) < 1e-2, found["errors"]
        assert found["loaded"] == [True, True]
        assert found["same"]
        *norms, again, in_fp32 = found["norms"]
        assert again == norms[2]
        assert norms == pytest.approx(found["wide norms"], rel=1e-2)
        assert in_fp32 == pytest.approx(again, rel=1e-2)
