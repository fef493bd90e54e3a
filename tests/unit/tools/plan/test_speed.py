"""The parts of the estimate of a step's time: links, experts, launches and fp8."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.memory.hardware import gpus_elsewhere
from nemo_kto.memory.run_plan import Plan, make_plan
from nemo_kto.models.flops import Passes
from nemo_kto.tools.plan.speed import LINK_EFFICIENCY, MEMORY_EFFICIENCY, speed_of, step_speed, step_traffic
from tests.helpers.published_models import CONFIGS
from tests.unit.conftest import Load

TENSOR = "model.tensor_model_parallel_size=4"
STAGES = "model.pipeline_model_parallel_size={}"
FULL = "model.activations_checkpoint_granularity=full"
INSTANCES = "model.optim.num_distributed_optimizer_instances=2"


MIXTURE, EXPERTS = "Qwen3-30B-A3B", "model.expert_model_parallel_size={}"
OF_RANKS = (EXPERTS.format(16), "model.expert_tensor_parallel_size=1")


@pytest.fixture
def plan(load: Load, tmp_path: Path) -> Callable[..., Plan]:
    """``plan(gpus, "key=value", ..., model=name)``: the plan of a run on H100s."""

    def of(gpus: int, *keys: str, model: str = "Llama-3.1-8B") -> Plan:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
        run = ResolvedRun.of(load(f"pretrained_checkpoint.restore_from_path={tmp_path}", "trainer.precision=bf16", *keys))
        return make_plan(run, gpus_elsewhere(gpus, "h100"))

    return of


def seconds(plan: Plan, **changes: Any) -> float:
    """Seconds of a step without the bubble, with other figures of the GPU."""
    found = step_speed(plan.training, plan.step, replace(plan.machines.hardware, **changes))
    return found.seconds * (1 - found.bubble)


@pytest.mark.parametrize(
    ("gpus", "keys", "ports"),
    [
        (8, [TENSOR, STAGES.format(2)], {}),
        # a stage is one machine: its data-parallel ranks are on it, and its neighbours are on the other
        (16, [TENSOR, STAGES.format(2)], {"pipeline": 1}),
        # two ranks of each data-parallel group are on a machine, and the ring leaves it over the ports of both
        (32, [TENSOR, STAGES.format(2)], {"pipeline": 1, "data": 2}),
        (16, [TENSOR, STAGES.format(1)], {"data": 2}),
        # an optimizer instance is one machine, and a group of instances has one rank on each
        (16, [TENSOR, STAGES.format(1), INSTANCES], {"instances": 1}),
    ],
)
def test_what_crosses_machines(gpus: int, keys: list[str], ports: dict[str, int], plan: Callable[..., Plan]) -> None:
    """Megatron numbers tensor-parallel ranks first, then data-parallel ones, and the stages of the pipeline last."""
    found = plan(gpus, *keys)
    stages = [step_traffic(found.training, found.step, stage=stage) for stage in range(found.training.split.stages)]
    assert all(getattr(stages[0], name) > 0 for name in ports)
    sent = max(sum(getattr(traffic, name) / count for name, count in ports.items()) for traffic in stages)
    # so slow that all else takes no time, except the products of the slowest stage
    over_network = seconds(found, link=math.inf, network=1.0) - seconds(found, link=math.inf, network=math.inf)
    assert over_network == pytest.approx(sent / LINK_EFFICIENCY, rel=1e-6)


def test_the_ring_of_a_group_is_no_faster_than_the_links_of_a_machine(plan: Callable[..., Plan]) -> None:
    """Eight ranks on each of two machines."""
    found = plan(16)
    sent = speed_of(found).traffic.data / LINK_EFFICIENCY
    without = seconds(found, link=math.inf, network=math.inf)
    assert seconds(found, link=1e9, network=1e9) - without == pytest.approx(sent / 1e9)
    assert seconds(found, link=math.inf, network=1e9) - without == pytest.approx(sent / 8e9)


def test_tokens_for_experts_are_sent_within_and_between_machines(plan: Callable[..., Plan]) -> None:
    """Of the 15 other ranks 7 are on the same machine."""
    found = plan(16, *OF_RANKS, model=MIXTURE)
    sent, without = speed_of(found).traffic.expert, seconds(found, link=math.inf, network=math.inf)
    others = speed_of(found).traffic.data / 8  # between the machines, over all ports
    between = seconds(found, link=math.inf, network=1e9) - without
    assert between == pytest.approx((sent * 8 / 15 + others) / (1e9 * LINK_EFFICIENCY))
    within = seconds(found, link=1e9, network=math.inf) - without
    assert within == pytest.approx((sent * 7 / 15 + speed_of(found).traffic.data) / (1e9 * LINK_EFFICIENCY))


def test_experts_take_longer_than_their_flops(plan: Callable[..., Plan]) -> None:
    """Their products are small, and each layer moves eight copies of each token, four times there and back."""
    found = plan(16, *OF_RANKS, "model.data.seq_length=4096", "model.micro_batch_tokens=4096", model=MIXTURE)
    step, passes = found.step, 1 + found.step.forward_only
    assert (step.forward_only, step.rows, step.width, step.micro_batches) == (1, 64, 4096, 4)
    choices = 8 * step.tokens / 16  # of a rank
    moved = 48 * (passes + 1) * 4 * 2 * choices * 2048 * 2
    faster = seconds(found) - seconds(found, bandwidth=math.inf)
    assert faster == pytest.approx(moved / (3.35e12 * MEMORY_EFFICIENCY))
    # 4 micro-batches of 4,096 tokens on 16 ranks, 8 of 128 experts for each: 4,096 tokens, a quarter more than without
    flops = 48 * (passes + 2) * choices * 3 * 2 * 2048 * 768
    dense = speed_of(found).flops / 16 / (0.5 * 989e12)
    alone = seconds(found, link=math.inf, network=math.inf, bandwidth=math.inf)
    assert alone - dense == pytest.approx(flops / 4 / (0.5 * 989e12))


@pytest.mark.parametrize(
    ("keys", "milliseconds"),
    [
        # a layer of a micro-batch: two passes forward (KL), one backward
        ([], 0.2 * 2 + 0.3),
        ([FULL], 0.2 * 3 + 0.3),
        # two of the policy and two of the reference, twice as long each
        (["model.peft.peft_scheme=lora"], 2 * (0.2 * 4 + 0.3)),
    ],
)
def test_the_host_launches_kernels_no_faster(keys: list[str], milliseconds: float, plan: Callable[..., Plan]) -> None:
    """With rows of 32 tokens, one in each of 64 micro-batches."""
    found = plan(1, *keys, "model.data.seq_length=32", "model.micro_batch_size=1")
    assert found.step.micro_batches == 64
    assert speed_of(found).seconds == pytest.approx(64 * 32 * milliseconds / 1000)
    assert seconds(found, link=None) < speed_of(found).seconds


def test_fp8_halves_the_time_of_linear_layers_without_experts(plan: Callable[..., Plan]) -> None:
    keys = ["model.data.seq_length=4096", "model.micro_batch_tokens=4096"]
    bf16, fp8 = (plan(1, *keys, f"model.fp8={recipe}") for recipe in ("null", "hybrid"))
    linear = bf16.training.flops.of_passes(Passes(forward=2, backward=1)).per_token * bf16.step.tokens
    assert seconds(bf16) - seconds(fp8) == pytest.approx(linear / (0.5 * 989e12) * (1 - 989 / 1979))
    assert seconds(plan(1, *keys, model=MIXTURE)) == seconds(plan(1, *keys, "model.fp8=hybrid", model=MIXTURE))
