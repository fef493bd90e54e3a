"""A backward pass adds gradients to main_grad without tensors of their size; recomputation saves less and changes none."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed import state
from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss
from nemo_kto.models.engine.sequences import SequenceBatch
from tests.helpers import lora_jobs
from tests.helpers.engines import engine
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint


def batch_of(rows: int, width: int) -> SequenceBatch:
    """Random sequences, all of whose tokens are responses."""
    tokens_BS = torch.randint(0, 256, (rows, width), generator=torch.Generator().manual_seed(1))
    return SequenceBatch.of(tokens_BS, tokens_BS.clone(), torch.full((rows,), width))


def likelihood_loss(_: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
    rows = torch.tensor(float(len(logprobs.response_b)))
    return MicroBatchLoss.of({"loss_sum": -logprobs.response_b.sum(), "rows": rows})


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
    runs.zero_grad()
    weights = [weight for weight in chunks[0].parameters() if weight.dim() == 2]
    there = {weight.untyped_storage().data_ptr() for weight in weights}
    there |= {weight.main_grad.untyped_storage().data_ptr() for weight in weights}
    with NewTensors({weight.shape for weight in weights}, there) as made:
        runs.forward_backward(batch_of(4, 11), likelihood_loss, forward_only=False)
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


ROWS, WIDTH = 2, 64
LAYERS, FFN = 4, 128  # of the tiny llama
CHOICES: dict[str, dict[str, Any]] = {
    "none": {},
    **{
        name: {"recompute": "selective", "recompute_modules": name.split("+")}
        for name in ("mlp", "core_attn", "mlp+core_attn")
    },
    "full": {"recompute": "full"},
}


def pass_with(folder: Path, settings: dict[str, Any], overlap: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients of a forward and backward pass, and the bytes saved between the two."""
    chunks, architecture = lora_jobs.build(folder, state.Layout(), overlap=overlap, **settings)
    weights = {weight.untyped_storage().data_ptr() for weight in chunks[0].parameters()}
    kept: list[torch.Tensor] = []
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def loss(hidden: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
        storages = [tensor.untyped_storage() for tensor in kept]
        sizes.append(sum({kept.data_ptr(): kept.nbytes() for kept in storages if kept.data_ptr() not in weights}.values()))
        return likelihood_loss(hidden, logprobs)

    runs = engine(chunks, architecture)
    runs.zero_grad()
    # where hooks take tensors away, weights come back without the marks that overlapping needs
    counted = contextlib.nullcontext() if overlap else torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with counted:
        runs.forward_backward(batch_of(ROWS, WIDTH), loss, forward_only=False)
    return [weight.main_grad.clone() for weight in unwrap_model(chunks[0]).parameters()], sizes[0]


def passes(folder: Path) -> dict[str, tuple[bool, int]]:
    """On a rank, for each setting: whether the gradients equal those without recomputation, and the saved bytes."""
    state.init_distributed(layout=state.Layout(), seed=3)
    expected, _ = pass_with(folder, {}, overlap=False)
    found = {}
    for name, settings in CHOICES.items():
        gradients, size = pass_with(folder, settings, overlap=False)
        gradients += pass_with(folder, settings, overlap=True)[0]
        found[name] = (all(map(torch.equal, gradients, expected * 2)), size)
    return found


def test_recomputation_saves_memory_and_changes_no_gradient(ranks: RankPool, tmp_path: Path) -> None:
    ((found),) = ranks.run(1, passes, make_checkpoint(tmp_path / "model", "llama"))
    assert {name for name, (same, _) in found.items() if not same} == set()
    kept = {name: size for name, (_, size) in found.items()}
    assert kept["full"] < kept["mlp+core_attn"] <= kept["mlp"] < kept["none"], kept
    # of the MLP: the gate and up projections, and the input of the down projection
    assert kept["none"] - kept["mlp"] == LAYERS * ROWS * WIDTH * 3 * FFN * 4, kept
    # attention is fused: to compute it again saves less than a tenth
    assert 0.9 * kept["none"] < kept["core_attn"] <= kept["none"], kept
    print(kept)


def adapters_learn(folder: Path) -> list[bool]:
    """On a rank: whether gradients of adapters only on MLPs equal those without recomputation, and none of A is zero."""
    tokens, found = torch.randint(0, 256, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1)), []
    for choice in ("none", "mlp", "full"):
        settings = LoRASettings(rank=2, alpha=2, target_modules=("mlp",))
        gpt = unwrap_model(lora_jobs.build(folder, state.Layout(), settings, **CHOICES[choice])[0][0])
        trained = {name: weight for name, weight in gpt.named_parameters() if weight.requires_grad}
        for name, weight in trained.items():
            if name.endswith("lora_b"):
                torch.nn.init.ones_(weight)
        (gpt(tokens, torch.arange(WIDTH).expand_as(tokens), None) ** 2).sum().backward()
        found.append({name: weight.main_grad for name, weight in trained.items()})
    for each in found[1:]:
        for name, grad in each.items():
            torch.testing.assert_close(grad, found[0][name], rtol=1e-4, atol=1e-4)
    return [all(bool(grad.any()) for grad in each.values()) for each in found]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_adapters_on_recomputed_mlps_are_trained(family: str, ranks: RankPool, tmp_path: Path) -> None:
    """Nothing before the first adapter is trained, and recomputed layers have gradients only if their input requires one."""
    assert ranks.run(1, adapters_learn, make_checkpoint(tmp_path / "model", family)) == [[True] * 3]
