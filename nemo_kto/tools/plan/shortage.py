"""A run of which no layout fits: what its model needs, the smallest number of GPUs that fits, and LoRA on those given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from nemo_kto.architecture.stages import ONE_STAGE
from nemo_kto.memory.hardware import GPUS_PER_MACHINE
from nemo_kto.memory.rank_memory import RankMemory, rank_memory
from nemo_kto.memory.run_plan import LORA, Plan, changed, make_plan
from nemo_kto.tools.plan.layouts import best_layouts, fitting_layouts

_COUNTS = 16  # numbers of GPUs that are tried


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What a run lacks of which no layout fits on the GPUs given."""

    whole: RankMemory  # of one rank that would hold the whole model
    gpus: int | None  # smallest number of GPUs of this kind that fits; None if none of those tried does
    most_tried: int
    lora: Plan | None  # LoRA on the GPUs given; None if it does not fit either, or the run has adapters already


def find_shortage(plan: Plan) -> Shortage:
    """Search a larger number of GPUs, and LoRA, for a plan of which no layout fits."""
    training = plan.training
    one_rank = replace(
        training,
        architecture=replace(training.architecture, tensor_parallel=1, expert_tensor_parallel=1),
        split=ONE_STAGE,
        data_parallel=1,
        context_parallel=1,
        expert_parallel=1,
        optimizer_instances=1,
    )
    whole = rank_memory(one_rank, stage=0)
    sufficient = math.ceil((whole.weights + whole.gradients + whole.optimizer) / plan.machines.hardware.memory)
    counts = list(islice(_counts(max(plan.machines.ranks + 1, sufficient)), _COUNTS))
    larger = (replace(plan, machines=replace(plan.machines, ranks=count)) for count in counts)
    lora = None
    if plan.training.adapters is None:
        lora = replace(make_plan(changed(plan.run, LORA), plan.machines), fixed=plan.fixed)
    return Shortage(
        whole=whole,
        gpus=next((each.machines.ranks for each in larger if any(fitting_layouts(each))), None),
        most_tried=counts[-1],
        lora=None if lora is None else next(iter(best_layouts(lora, 1)), None),
    )


def _counts(least: int) -> Iterator[int]:
    """Yield numbers of GPUs from ``least`` on: each one on a machine, then whole machines."""
    while True:
        if least > GPUS_PER_MACHINE:
            least = math.ceil(least / GPUS_PER_MACHINE) * GPUS_PER_MACHINE
        yield least
        least += 1
