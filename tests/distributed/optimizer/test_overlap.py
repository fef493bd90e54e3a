"""Overlap of communication with computation does not change the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file
from torch._C import _current_graph_task_id as current_graph_task_id

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.checkpoint.sharded_state import sharded_weights
from nemo_kto.distributed import gradients as overlapping
from nemo_kto.distributed import state
from nemo_kto.huggingface.rank_weights import rank_weights
from nemo_kto.models.engine import optimizer as of_models
from nemo_kto.models.engine.reference import SwappedWeights
from nemo_kto.models.lora.adapters import merge_adapters
from tests.distributed.models.test_gradients import make_batch
from tests.helpers import lora_jobs
from tests.helpers.engines import engine, kto_model
from tests.helpers.job_cache import CHECKPOINTS, JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import shards, trajectory

STEPS = 3


def one_bucket(**settings: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(**settings)


def small_buckets(**settings: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(**settings, bucket_size=9000)  # parameters: less than two layers of the tiny model


class Watched:
    """Notes whether a bucket's gradients were sent within a backward pass, and its weights within a forward pass."""

    def __init__(self, chunks: list[Any]) -> None:
        self.is_forward = False
        groups = [group for chunk in chunks for group in overlapping.bucket_groups(chunk)]
        self.buckets = len(groups)
        self.sums: list[bool] = []
        self.gathers: list[bool] = []
        for chunk in chunks:
            chunk.register_forward_pre_hook(lambda *_: setattr(self, "is_forward", True), prepend=True)
            chunk.register_forward_hook(lambda *_: setattr(self, "is_forward", False))
        for group in groups:
            group.start_grad_sync = self._noted(group.start_grad_sync, self.sums, lambda: current_graph_task_id() >= 0)
            group.start_param_sync = self._noted(group.start_param_sync, self.gathers, lambda: self.is_forward)

    def _noted(self, start: Callable[..., None], notes: list[bool], is_within: Callable[[], bool]) -> Callable[..., None]:
        def recorded(*arguments: Any, **options: Any) -> None:
            notes.append(is_within())
            start(*arguments, **options)

        return recorded


@dataclass(frozen=True, kw_only=True)
class Case:
    """``reader``: who looks at the weights after the last step, and must make them whole."""

    world: int = 2
    layout: state.Layout = field(default_factory=state.Layout)
    tied: bool = False
    lora: LoRASettings | None = None
    distributed: bool = True
    cached: bool = True
    small: bool = True
    reader: str = "finite"

    @property
    def clip_grad(self) -> float:
        """Norms are summed bucket by bucket and rounded differently; no step shows it as long as none is clipped."""
        return 1e6 if self.small and self.distributed else lora_jobs.CLIP


def read(reader: str, model: Any, architecture: Any) -> None:
    chunks = model.engine.chunks
    if reader == "finite":
        assert model.has_finite_weights()
    elif reader == "save":
        sharded_weights(chunks, adapters=False)
    elif reader == "export":
        list(rank_weights(chunks, architecture))
    elif reader == "merge":
        merge_adapters(chunks)


def steps(folder: Path, case: Case, overlap: bool) -> tuple[list[float], list[float], list[torch.Tensor], Watched]:
    """Losses and norms of a few KTO steps, the weights after them, and when buckets were sent."""
    distributed = case.distributed
    chunks, architecture = lora_jobs.build(folder, case.layout, case.lora, distributed=distributed, overlap=overlap)
    weights_of = [weight for chunk in chunks for weight in unwrap_model(chunk).parameters()]
    trained = [weight for weight in weights_of if weight.requires_grad]
    frozen = SwappedWeights(parameters=trained, finish_gathers=partial(overlapping.finish_gathers, chunks))
    model = kto_model(engine(chunks, architecture), frozen.active, beta=0.3, weights=(1.0, 1.5))
    optimizer = lora_jobs.optimizer_of(chunks, distributed=distributed, clip_grad=case.clip_grad)
    watched = Watched(chunks)
    mine = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
    rows = {name: values[mine] for name, values in make_batch().items()}
    known, losses, norms = model.get_ref_policy_logprobs(rows), [], []
    for _ in range(STEPS):
        samples, kl_samples = (known if case.cached else model.get_ref_policy_logprobs(rows)).chunk(2)
        model.zero_grad()
        batch = {**rows, "ref_policy_log_probs_samples": samples, "ref_policy_log_probs_kl_samples": kl_samples}
        loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
        assert not model.ranks_not_finite()
        _, norm, _ = optimizer.step()
        losses += [loss, metrics["kl"]]
        norms.append(float(norm))
    read(case.reader, model, architecture)
    weights = [weight.detach().clone() for weight in weights_of]
    return losses, norms, weights, watched


def compare(folder: Path, case: Case) -> dict[str, Any]:
    """On a rank: are the losses and weights the same, the largest difference of the norms, and when buckets were sent."""
    state.init_distributed(layout=case.layout, seed=3)
    of_models.DistributedDataParallelConfig = small_buckets if case.small else one_bucket  # type: ignore[misc]
    try:
        found = [steps(folder, case, overlap) for overlap in (False, True)]
    finally:
        of_models.DistributedDataParallelConfig = DistributedDataParallelConfig  # type: ignore[misc]
    (losses_before, norms_before, weights_before, _), (losses, norms, weights, watched) = found
    return {
        "losses": losses == losses_before and len(set(losses)) > STEPS,
        "weights": all(map(torch.equal, weights, weights_before)),
        "norms": max(abs(a - b) / b for a, b in zip(norms, norms_before, strict=True)),
        "buckets": watched.buckets,
        "sums": watched.sums,
        "gathers": watched.gathers,
    }


CASES = {
    "dp2_one_bucket": Case(small=False),
    "dp2_tied": Case(tied=True, reader="save"),
    "dp2_swapped": Case(cached=False, reader="export"),
    "dp2_tied_all_reduce": Case(tied=True, distributed=False, cached=False),
    "dp2_lora": Case(lora=LoRASettings(rank=4, alpha=8, target_modules=("all",)), reader="merge"),
    "dp2_dora": Case(lora=LoRASettings(rank=4, alpha=8, target_modules=("all",), dora=True), reader="export"),
    "tp2_dp2_tied": Case(world=4, layout=state.Layout(tensor=2), tied=True),
    "pp2_dp2_tied": Case(world=4, layout=state.Layout(pipeline=2), tied=True, cached=False),
    "pp2_vp2_dp2_tied": Case(world=4, layout=state.Layout(pipeline=2, virtual=2), tied=True),
    "dp4_of_2_instances": Case(world=4, layout=state.Layout(optimizer_instances=2)),
    "pp2_dp2_of_2_instances": Case(world=4, layout=state.Layout(pipeline=2, optimizer_instances=2), tied=True),
    "pp2_vp2_dp2_of_2_instances": Case(world=4, layout=state.Layout(pipeline=2, virtual=2, optimizer_instances=2)),
    "pp2_dp2_all_reduce": Case(world=4, layout=state.Layout(pipeline=2), distributed=False),
}


QUICK = ("dp2_one_bucket", "dp2_swapped", "dp2_tied_all_reduce")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in CASES])
def test_overlap_changes_no_step(name: str, ranks: RankPool, tmp_path: Path) -> None:
    case = CASES[name]
    model = make_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=case.tied)
    for rank, found in enumerate(ranks.run(case.world, compare, model, case)):
        assert found["losses"]
        assert found["weights"]
        assert found["norms"] < (1e-6 if case.small and case.distributed else 1e-12)
        buckets = found["buckets"]
        # megatron-core counts the gradients of the first backward pass; later stages send theirs when all have ended, and a
        # stage of several chunks those of a chunk between two backward passes
        if rank < case.world // case.layout.pipeline and case.layout.virtual is None:
            assert found["sums"] == [False] * buckets + [True] * (STEPS - 1) * buckets
            assert (buckets > 1) == case.small
        else:
            assert not any(found["sums"])
        # with a cached reference the model's next pass gathers, but for the last time: then somebody reads the weights
        gathers = [case.cached] * (STEPS - 1) * buckets + [False] * buckets
        assert found["gathers"] == (gathers if case.distributed else [])


def test_checkpoints_and_exports_with_overlap(jobs: JobCache) -> None:
    """With a cached reference nothing but the save itself makes the weights whole before they are written."""
    common = [*CHECKPOINTS, "trainer.kto.max_steps=2", "model.reference.mode=cached", "export.enabled=true"]
    runs = [jobs(world_size=2, overrides=[*common, f"model.optim.overlap={overlap}"]) for overlap in ("false", "true")]
    assert trajectory(runs[0]) == trajectory(runs[1])
    for step in (1, 2):
        plain, overlapped = (shards(run, step=step) for run in runs)
        assert plain == overlapped
        assert len(plain) == 2
    weights = [load_file(run / "hf" / "model-00001-of-00001.safetensors") for run in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
