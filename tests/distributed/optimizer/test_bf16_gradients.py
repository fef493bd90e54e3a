"""Gradients that are summed in bf16 are those in fp32 up to rounding, and the checkpoints of both are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model

from nemo_kto.distributed import state
from tests.helpers import lora_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun

BF16, FP32 = torch.bfloat16, torch.float32


class Run(SavedRun):
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
    run = Run(model, folder, False)
    norms = run.steps(2)
    run.manager.save({"step": 2}, {})
    again = [Run(model, folder, reduce_in_fp32) for reduce_in_fp32 in (False, True)]
    for each in again:
        each.load()
    loaded = [all(torch.equal(*pair) for pair in zip(run.weights(), each.weights(), strict=True)) for each in again]
    further = [each.steps(1)[0] for each in (run, *again)]
    same = all(torch.equal(*pair) for pair in zip(run.weights(), again[0].weights(), strict=True))
    return {
        "types": {str(grad.dtype) for grad in narrow.values()},
        "errors": errors,
        "norms": [*norms, *further],
        "wide norms": Run(model, folder, True).steps(3),
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
