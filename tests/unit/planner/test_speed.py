"""The links that each kind of communication uses in the estimate of a step's time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.planner.plan_run import gpus_elsewhere, make_plan
from nemo_kto.planner.speed import LINK_EFFICIENCY, step_speed
from tests.unit.conftest import Load
from tests.unit.planner.test_plan import LLAMA

TENSOR = "model.tensor_model_parallel_size=4"
STAGES = "model.pipeline_model_parallel_size={}"
INSTANCES = "model.optim.num_distributed_optimizer_instances=2"


@pytest.mark.parametrize(
    ("gpus", "keys", "over_network"),
    [
        (8, [TENSOR, STAGES.format(2)], set()),
        # a stage is one machine: its data-parallel ranks are on it, and its neighbours are on the other
        (16, [TENSOR, STAGES.format(2)], {"pipeline"}),
        (32, [TENSOR, STAGES.format(2)], {"pipeline", "data"}),
        (16, [TENSOR, STAGES.format(1)], {"data"}),
        # an optimizer instance is one machine
        (16, [TENSOR, STAGES.format(1), INSTANCES], {"instances"}),
    ],
)
def test_what_crosses_machines(gpus: int, keys: list[str], over_network: set[str], load: Load, tmp_path: Path) -> None:
    """Megatron numbers tensor-parallel ranks first, then data-parallel ones, and the stages of the pipeline last."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = ResolvedRun.of(load(f"pretrained_checkpoint.restore_from_path={tmp_path}", "trainer.precision=bf16", *keys))
    plan = make_plan(run, gpus_elsewhere(gpus, "h100"))
    hardware = replace(plan.machines.hardware, link=math.inf, network=1e9)
    found = step_speed(plan.training, plan.step, hardware)
    alone = step_speed(plan.training, plan.step, replace(hardware, network=math.inf))
    sent = sum(getattr(found.traffic, name) for name in over_network)
    assert (sent > 0) is bool(over_network)
    assert found.seconds - alone.seconds == pytest.approx(sent / (1e9 * LINK_EFFICIENCY) / (1 - found.bubble))
