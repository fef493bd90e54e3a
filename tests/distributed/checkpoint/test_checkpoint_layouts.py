"""A run resumed at a new layout after every checkpoint has the same gradients, with both optimizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_kto.distributed.state import Layout
from tests.helpers import hf_models, lora_jobs
from tests.helpers.rank_pool import RankPool

QUICK = {
    "tensor 2": (2, Layout(tensor=2)),
    "pipeline 2 in 2 chunks": (2, Layout(pipeline=2, virtual=2)),
    "data 2 in 2 optimizer instances": (2, Layout(optimizer_instances=2)),
}
LAYOUTS = {
    "tensor 2 x pipeline 2": (4, Layout(tensor=2, pipeline=2)),
    "pipeline 2 in 2 chunks x data 2": (4, Layout(pipeline=2, virtual=2)),
    "data 4": (4, Layout()),
    "data 4 in 2 optimizer instances": (4, Layout(optimizer_instances=2)),
    "one rank": (1, Layout()),
    "tensor 2 x data 2": (4, Layout(tensor=2)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads and a vocabulary that are padded, differently at each layout."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    hf_models.write_model("llama-odd-heads", folder)
    return folder


@pytest.mark.parametrize(
    ("layouts", "distributed"),
    [(QUICK, True), *(pytest.param(LAYOUTS, distributed, marks=pytest.mark.full) for distributed in (True, False))],
    ids=["two ranks", "distributed_optimizer", "replicated_optimizer"],
)
def test_resuming_at_a_new_layout_after_every_checkpoint(
    layouts: dict[str, tuple[int, Layout]], distributed: bool, model: Path, ranks: RankPool, tmp_path: Path
) -> None:
    run, job = tmp_path / "run", lora_jobs.train_and_save
    (whole,) = ranks.run(1, job, Layout(), model, None, tmp_path / "whole", len(layouts), distributed)
    for step, (world_size, layout) in enumerate(layouts.values(), start=1):
        layout = layout if distributed else replace(layout, optimizer_instances=1)
        for norms in ranks.run(world_size, job, layout, model, None, run, step, distributed):
            # of a single step to 1e-5, after several to 1e-4, as docs/internals/numerics.md has it
            assert norms == pytest.approx(whole[step - 1 : step], rel=1e-5 if step == 1 else 1e-4), layout
