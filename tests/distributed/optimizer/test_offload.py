"""A partly offloaded optimizer: the same steps, and checkpoints exchanged with an optimizer on the GPU.

megatron-core's HybridDeviceOptimizer asks each tensor whether it is on a GPU when it shares them out. Here all are, but for
those that it has brought to the host; all that follows is its own. The GPU's Adam is that of fused_adam.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from nemo_kto.distributed import state
from nemo_kto.models.engine.optimizer import fuse_torch_adam
from tests.distributed.optimizer import fused_adam
from tests.helpers import lora_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun

ONE_COPY = state.Layout()
# The offloaded parts before and after the checkpoint.
CHANGES = {"kept": (0.5, 0.5), "all": (1.0, 1.0), "to_host": (0.0, 0.5), "from_host": (0.5, 0.0), "more": (0.5, 1.0)}


class _OnHost(torch.Tensor):
    """The offloaded tensors."""


@contextlib.contextmanager
def _on_gpus(*, has_engine: bool = True) -> Iterator[None]:
    """Within the block a parameter is on a GPU until it is brought to the host."""
    share_out, give_gradients = (
        HybridDeviceOptimizer._get_sub_optimizer_param_groups,
        HybridDeviceOptimizer._set_sub_optimizer_grads,
    )

    def shared_out(self: Any, fraction: float) -> Any:
        with (
            mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: not isinstance(tensor, _OnHost))),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor.as_subclass(_OnHost)),
        ):
            on_host, on_gpu, copies, originals, mains = share_out(self, fraction)
        plain = {copy: copy.as_subclass(torch.Tensor) for copy in originals}
        for group in on_host:
            group["params"] = [plain[copy] for copy in group["params"]]
        copies, mains = ({key: plain.get(copy, copy) for key, copy in each.items()} for each in (copies, mains))
        return on_host, on_gpu, copies, {plain[copy]: original for copy, original in originals.items()}, mains

    def unpinned(self: Any) -> None:
        self.pin_cpu_grads = False  # page-locked memory needs a GPU
        give_gradients(self)

    with (
        mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", shared_out),
        mock.patch.object(HybridDeviceOptimizer, "_set_sub_optimizer_grads", unpinned),
        fused_adam.used() if has_engine else contextlib.nullcontext(),
    ):
        yield


class Run(SavedRun):
    """A model in bf16, in training, and its checkpoints."""

    def __init__(self, model: Path, folder: Path, fraction: float, layout: state.Layout = ONE_COPY) -> None:
        chunks, _ = lora_jobs.build(model, layout, None, dtype=torch.bfloat16)
        optimizer = lora_jobs.optimizer_of(chunks, dtype=torch.bfloat16, offload_fraction=fraction)
        super().__init__(model, folder, chunks, optimizer)

    def flat_weights(self) -> torch.Tensor:
        return torch.cat([weight.float().flatten() for weight in self.weights()])

    @property
    def inner(self) -> list[Any]:
        """The Adam of all layers but the experts, and theirs."""
        return [part.optimizer for part in self.optimizer.chained_optimizers]

    def counts(self) -> list[float]:
        """The step counts of each Adam."""
        adams = [adam for inner in self.inner for adam in getattr(inner, "sub_optimizers", [inner])]
        fused = [group["step"] for adam in adams if isinstance(adam, fused_adam.FusedAdam) for group in adam.param_groups]
        of_torch = [kept["step"] for adam in adams if isinstance(adam, torch.optim.AdamW) for kept in adam.state.values()]
        return sorted({float(count) for count in [*fused, *of_torch]})

    def on_host(self) -> list[float]:
        """The offloaded fraction of the main weights of each Adam."""
        shares = []
        for inner in self.inner:
            pieces = [piece for group in inner.param_groups for piece in group["params"]]
            there = inner.gpu_params_map_cpu_copy
            shares.append(sum(piece.numel() for piece in pieces if piece in there) / sum(piece.numel() for piece in pieces))
        return shares


def trained(
    model: Path, folder: Path, change: str, layout: state.Layout = ONE_COPY, has_engine: bool = True
) -> dict[str, Any]:
    """Two steps, a checkpoint, and two steps more from there, beside a run of four whose optimizer is on the GPU."""
    state.init_distributed(layout=layout, seed=3)
    before, after = CHANGES[change]
    with _on_gpus(has_engine=has_engine):
        plain = Run(model, folder / "plain", 0.0, layout)
        if not has_engine:  # as on a GPU, and as megatron-core's offloaded optimizer everywhere
            fuse_torch_adam(plain.inner)
        norms = plain.steps(4)
        first = Run(model, folder / "first", before, layout)
        mine = first.steps(2)
        first.manager.save({"step": 2}, {})
        second = Run(model, folder / "first", after, layout)
        second.load()
        mine += second.steps(2)
        again = second.counts()
        second.manager.save({"step": 4}, {})
    return {
        "weights": float((second.flat_weights() - plain.flat_weights()).abs().max()),
        "norms": max(abs(one - other) / other for one, other in zip(mine, norms, strict=True)),
        "counts": again,
        "on_host": second.on_host() if after else [0.0],
    }


def assert_same_steps(of_rank: dict[str, Any], after: float) -> None:
    """Those of an optimizer on the GPU, with such a part on the host in the end."""
    assert of_rank["counts"] == [4.0]
    for part in of_rank["on_host"]:
        assert after <= part <= min(1.0, after + 0.3), "the part, and at most one weight more"
    assert of_rank["norms"] < 1e-3
    assert of_rank["weights"] < 2**-8, "one rounding of a weight of about 1 to bf16; each step moves it by about 0.01"


@pytest.mark.parametrize("change", [pytest.param(name, marks=[pytest.mark.full] * (name != "to_host")) for name in CHANGES])
def test_steps_equal_those_without_offload(change: str, ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    for of_rank in ranks.run(2, trained, tiny_llama, tmp_path, change):
        assert_same_steps(of_rank, CHANGES[change][1])


def test_without_transformer_engine(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    """torch's AdamW updates both parts."""
    for of_rank in ranks.run(2, trained, tiny_llama, tmp_path, "kept", ONE_COPY, False):
        assert_same_steps(of_rank, CHANGES["kept"][1])
        assert (of_rank["norms"], of_rank["weights"]) == (0.0, 0.0), "the same kernel"


@pytest.mark.full
@pytest.mark.parametrize("change", ["kept", "to_host"])
def test_experts_are_partly_offloaded_too(
    change: str, ranks: RankPool, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Experts have a separate optimizer, over the ranks with the same experts."""
    for of_rank in ranks.run(2, trained, tiny_checkpoint("mixtral"), tmp_path, change, state.Layout(expert=2)):
        assert len(of_rank["on_host"]) == 2, "an Adam for the experts, and one for the rest"
        assert_same_steps(of_rank, CHANGES[change][1])


def saved_at_once(model: Path, folder: Path, has_engine: bool) -> float:
    """The largest difference of the weights to those of a model that was saved before its first step, and loaded."""
    state.init_distributed(layout=state.Layout(), seed=3)
    with _on_gpus(has_engine=has_engine):
        run = Run(model, folder, 0.5)
        run.manager.save({"step": 0}, {})
        other = Run(model, folder, 0.5)
        other.load()
        run.steps(1)
        other.steps(1)
    return float((run.flat_weights() - other.flat_weights()).abs().max())


@pytest.mark.parametrize("has_engine", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_checkpoint_before_the_first_step(has_engine: bool, ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    assert ranks.run(1, saved_at_once, tiny_llama, tmp_path, has_engine) == [0.0]
