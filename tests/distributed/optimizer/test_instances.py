"""Several optimizer instances: the steps of one, more of the state on each rank, and the same resumed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer

from nemo_kto.architecture.parameters import rank_parameters
from nemo_kto.distributed import state
from nemo_kto.memory.rank_memory import Training
from nemo_kto.models.engine.optimizer import SkippingOptimizer
from tests.helpers import lora_jobs
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun


class Run(SavedRun):
    """A model in training, and its checkpoints."""

    def __init__(self, model: Path, folder: Path, layout: state.Layout) -> None:
        chunks, self.architecture = lora_jobs.build(model, layout, None)
        super().__init__(model, folder, chunks, lora_jobs.optimizer_of(chunks))

    def state_bytes(self) -> int:
        """Size of the moments on this rank."""
        states = [kept for part in self.optimizer.chained_optimizers for kept in part.optimizer.state.values()]
        return sum(kept[name].nbytes for kept in states for name in ("exp_avg", "exp_avg_sq"))


def trained(model: Path, folder: Path, layout: state.Layout) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more steps, once from there."""
    state.init_distributed(layout=layout, seed=3)
    first = Run(model, folder, layout)
    norms = first.steps(2)
    first.manager.save({"step": 2}, {})
    norms += first.steps(2)
    resumed = Run(model, folder, layout)
    resumed.load()
    again = resumed.steps(2)
    planned = Training(
        architecture=first.architecture, element_bytes=4, data_parallel=state.world_size(), expert_parallel=layout.expert,
        optimizer_instances=layout.optimizer_instances, micro_batch_tokens=1, micro_batch_width=1, micro_batches=1,
        logprob_chunk=1, on_gpu=False,
    )  # fmt: skip
    parameters = rank_parameters(first.architecture, expert_parallel=layout.expert)
    return {
        "norms": norms,
        "same": again == norms[2:] and all(map(torch.equal, first.weights(), resumed.weights())),
        "weights": [weight.numpy() for weight in first.weights()],
        "bytes": first.state_bytes(),
        "planned": planned.share(parameters) * planned.state_bytes(),
        "written": sum(file.stat().st_size for file in folder.glob("*/state/*.distcp")),
    }


def compare(ranks: RankPool, model: Path, folder: Path, world: int, instances: int, expert: int) -> None:
    one, several = (
        ranks.run(world, trained, model, folder / str(count), state.Layout(expert=expert, optimizer_instances=count))
        for count in (1, instances)
    )
    for of_one, of_several in zip(one, several, strict=True):
        assert of_several["norms"] == several[0]["norms"], "instances agree on the norm"
        assert of_several["norms"] == pytest.approx(of_one["norms"], rel=1e-5)
        for mine, other in zip(of_several["weights"], of_one["weights"], strict=True):
            assert abs(mine - other).max() < 1e-5
        assert of_several["same"], "a resumed run has the same steps"
    for found in (one, several):  # padding of the buckets differs between ranks
        assert sum(each["bytes"] for each in found) == pytest.approx(sum(each["planned"] for each in found), rel=0.01)
    assert several[0]["written"] == pytest.approx(one[0]["written"], rel=0.05), "each value is written once"


@pytest.mark.parametrize(
    ("world", "instances"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full), pytest.param(4, 4, marks=pytest.mark.full)]
)
def test_steps_equal_those_of_one_instance(
    world: int, instances: int, ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    compare(ranks, tiny_llama, tmp_path, world, instances, expert=1)


@pytest.mark.full
def test_instances_of_the_optimizer_of_experts(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Two copies of the experts, each on two ranks: an instance has one of them."""
    compare(ranks, tiny_checkpoint("mixtral"), tmp_path, 4, 2, expert=2)


def agreed(layout: state.Layout) -> float:
    """The norm of the gradient if each rank computes another one."""
    state.init_distributed(layout=layout, seed=3)
    with mock.patch.object(ChainedOptimizer, "get_grad_norm", return_value=float(state.rank())):
        return object.__new__(SkippingOptimizer).get_grad_norm()


def test_ranks_with_the_same_state_agree_on_the_norm(ranks: RankPool) -> None:
    assert ranks.run(2, agreed, state.Layout(optimizer_instances=2)) == [1.0, 1.0]
    assert ranks.run(2, agreed, state.Layout()) == [0.0, 1.0]


@pytest.mark.full
def test_instances_of_two_ranks_agree_on_the_norm(ranks: RankPool) -> None:
    assert ranks.run(4, agreed, state.Layout(optimizer_instances=2)) == [2.0, 3.0, 2.0, 3.0]


def misused(layout: state.Layout) -> str:
    with pytest.raises(ValueError, match="must divide") as error:
        state.init_distributed(layout=layout, seed=3)
    return str(error.value)


def test_a_number_that_does_not_divide_the_ranks(ranks: RankPool) -> None:
    expected = Message("optimizer_instances", "2", "4", "smaller")
    assert ranks.run(2, misused, state.Layout(optimizer_instances=4)) == [expected] * 2
