"""A backward pass adds gradients to main_grad and allocates none of the size of a weight. See also test_gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_kto.distributed import state
from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss
from nemo_kto.models.engine.sequences import SequenceBatch
from tests.helpers import lora_jobs
from tests.helpers.engines import engine
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint

ROWS, WIDTH = 4, 11


class NewTensors(TorchDispatchMode):
    """Counts operations that write a tensor of one of these shapes outside memory that is there already."""

    def __init__(self, shapes: set[torch.Size], there: set[int]) -> None:
        super().__init__()
        self.shapes, self.there, self.found = shapes, there, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and isinstance(result, torch.Tensor) and result.shape in self.shapes:
            is_new = result._nnz() > 0 if result.is_sparse else result.untyped_storage().data_ptr() not in self.there
            self.found[str(function)] += is_new
        return result


def new_tensors(model: Path, overlap: bool) -> tuple[dict[str, int], list[bool]]:
    """Of the size of a weight, in a backward pass of two micro-batches; and whether each weight got a gradient."""
    layout = state.Layout()
    state.init_distributed(layout=layout, seed=3)
    chunks, architecture = lora_jobs.build(model, layout, None, overlap=overlap)
    runs = engine(chunks, architecture)
    tokens_BS = torch.randint(0, 256, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
    sequences = SequenceBatch.of(tokens_BS, tokens_BS.clone(), torch.full((ROWS,), WIDTH))

    def loss(_: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
        return MicroBatchLoss.of(
            {"loss_sum": -logprobs.response_b.sum(), "rows": torch.tensor(float(len(logprobs.response_b)))}
        )

    runs.zero_grad()
    weights = [weight for weight in chunks[0].parameters() if weight.dim() == 2]
    there = {weight.untyped_storage().data_ptr() for weight in weights}
    there |= {weight.main_grad.untyped_storage().data_ptr() for weight in weights}
    with NewTensors({weight.shape for weight in weights}, there) as made:
        runs.forward_backward(sequences, loss, forward_only=False)
    return {name: count for name, count in made.found.items() if count}, [bool(weight.main_grad.any()) for weight in weights]


@pytest.mark.parametrize(("tied", "overlap"), [(False, False), (True, True)], ids=["reduced_after", "tied_reduced_during"])
def test_no_gradient_of_the_size_of_a_weight_is_made(tied: bool, overlap: bool, ranks: RankPool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=tied)
    ((made, got),) = ranks.run(1, new_tensors, tmp_path / "model", overlap)
    # megatron-core's linear layers return an uninitialised tensor
    assert set(made) <= {"aten.empty.memory_format"}, made
    assert all(got)


def copies() -> tuple[int, float]:
    """Copies in a reduce-scatter of a tensor into its own part, as megatron-core calls it, and a value of the result."""
    from megatron.core.distributed import param_and_grad_buffer

    state.init_distributed(layout=state.Layout(), seed=3)
    group = torch.distributed.group.WORLD
    gradients = torch.ones(12)
    part = gradients.tensor_split(torch.distributed.get_world_size())[torch.distributed.get_rank()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        param_and_grad_buffer.dist_reduce_scatter_func(part, gradients, op=torch.distributed.ReduceOp.SUM, group=group)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_"), float(part.sum())


def test_one_rank_copies_no_gradients_to_reduce_them(ranks: RankPool) -> None:
    ((count, total),) = ranks.run(1, copies)
    assert (count, total) == (0, 12.0)
    for count, total in ranks.run(2, copies):
        assert count > 0
        assert total == 6 * 2.0
