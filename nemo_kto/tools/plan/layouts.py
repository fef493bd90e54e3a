"""Search for layouts: settings with which a run fits and is fast; where none fits, how much is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

from nemo_kto.architecture.stages import ONE_STAGE
from nemo_kto.memory.hardware import GPUS_PER_MACHINE
from nemo_kto.memory.rank_memory import RankMemory, rank_memory
from nemo_kto.memory.run_plan import (
    AXES,
    FULL_RECOMPUTATION,
    NO_RECOMPUTATION,
    Plan,
    Values,
    changed,
    degrees,
    divisors,
    expert_degrees,
    is_possible,
    make_plan,
    smaller_training,
)
from nemo_kto.tools.plan.speed import speed_of

_RECOMPUTE = (NO_RECOMPUTATION, {**NO_RECOMPUTATION, "activations_checkpoint_granularity": "selective"}, FULL_RECOMPUTATION)
_ROWS = (1, 2, 4)  # candidate numbers of rows of a micro-batch
_CHUNKS = (1, 2, 4)  # candidate numbers of model chunks of a pipeline stage
_COUNTS = 16  # numbers of GPUs that are tried if no layout fits
_CLOSE = 0.9  # fraction of the best speed from which on the layout with more free memory is preferred


def layouts(plan: Plan) -> Iterator[Values]:
    """Yield the model settings of every layout of the same number of ranks that the rules allow.

    Tensor parallelism stays within a machine and is always combined with sequence parallelism, which has no extra cost.
    Context parallelism is considered only for long sequences. Partitions into stages are even; embedding and loss may each
    count as one layer. Every layout has the settings in ``plan.fixed``.
    """
    ranks, architecture = plan.machines.ranks, plan.training.architecture
    of_row = plan.step.rows // plan.run.cfg.model.global_batch_size * plan.training.micro_batch_width
    fixed_axes = {axis: size for axis, size in plan.fixed.items() if axis in AXES}
    for tensor, pipeline, context in product(divisors(ranks), repeat=3):
        if ranks % (tensor * pipeline * context):
            continue
        experts = expert_degrees(architecture, ranks // pipeline)
        for chunks, counts_ends, of_experts in product(_CHUNKS, (False, True), experts):
            layout = {
                "tensor_model_parallel_size": tensor,
                "pipeline_model_parallel_size": pipeline,
                "context_parallel_size": context,
                "sequence_parallel": tensor > 1,
                "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
                "account_for_embedding_in_pipeline_split": counts_ends,
                "account_for_loss_in_pipeline_split": counts_ends,
                "micro_batch_size": None,
                **of_experts,
                **NO_RECOMPUTATION,
            }
            if any(layout.get(axis, size) != size for axis, size in fixed_axes.items()):
                continue
            if is_possible(plan, plan.run.with_model(**{**layout, **plan.fixed})):
                for recompute, rows in product(_RECOMPUTE, _ROWS):
                    yield {**layout, **recompute, "micro_batch_tokens": rows * of_row, **plan.fixed}


def fitting_layouts(plan: Plan) -> Iterator[Plan]:
    """Yield the plan of every layout that fits; larger micro-batches of one that does not are not tried."""
    too_large: Values = {}
    for values in layouts(plan):
        without_size = {**values, "micro_batch_tokens": None}
        if without_size == too_large:
            continue
        found = make_plan(plan.run.with_model(**values), plan.machines)
        if found.fits:
            yield found
        else:
            too_large = without_size


def best_layouts(plan: Plan, count: int) -> list[Plan]:
    """Return ``count`` layouts that fit, one per combination of sizes: the preferred one, then the fastest others.

    Of a combination the fastest is taken, on a tie the one with the larger micro-batch. The preferred layout is the one that
    leaves the most memory (to a GB), on a tie with the fewest tensor-parallel ranks, of those that reach 90 % of the best
    speed: the estimates of their speeds differ by less than their error, and free memory prevents failed allocations.
    """
    timed = [(speed_of(found).seconds, found) for found in fitting_layouts(plan)]
    best: dict[tuple[int, ...], tuple[float, Plan]] = {}
    for seconds, found in sorted(timed, key=lambda each: (each[0], -each[1].training.micro_batch_tokens)):
        sizes = (*degrees(found.run.cfg.model), found.run.cfg.model.expert_model_parallel_size)
        best.setdefault(sizes, (seconds, found))
    if not best:
        return []
    fastest = [found for _, found in best.values()]
    least = min(seconds for seconds, _ in best.values())
    close = [found for seconds, found in best.values() if least >= _CLOSE * seconds]
    preferred = min(close, key=lambda each: (round(each.largest.device / 1e9), each.training.tensor_parallel))
    return [preferred, *(each for each in fastest if each is not preferred)][:count]


def values_of(plan: Plan) -> Values:
    """Return the model settings that define the layout of a plan."""
    kinds = ["tensor_model", "pipeline_model", "virtual_pipeline_model"]
    kinds += ["context"] * (plan.training.context_parallel > 1)
    names = [*(f"{kind}_parallel_size" for kind in kinds), "sequence_parallel", *FULL_RECOMPUTATION, "micro_batch_tokens"]
    if plan.training.split.counts_embedding or plan.training.split.counts_loss:
        names += [f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")]
    if plan.training.architecture.experts is not None:
        names += ["expert_model_parallel_size", "expert_tensor_parallel_size"]
    return {name: getattr(plan.run.cfg.model, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What a run lacks of which no layout fits on the GPUs given."""

    whole: RankMemory  # of one rank that would hold the whole model
    gpus: int | None  # smallest number of GPUs of this kind that fits; None if none of those tried does
    most_tried: int
    smaller: Plan | None  # adapters, or a quantized base too, on the GPUs given; None if that does not fit either
    changes: Values  # settings of ``smaller``


def find_shortage(plan: Plan) -> Shortage:
    """Search a larger number of GPUs, LoRA, and a quantized base, for a plan of which no layout fits."""
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
    changes, smaller = {}, None
    for changes in smaller_training(plan.run):
        start = replace(make_plan(changed(plan.run, changes), plan.machines), fixed=plan.fixed)
        if (smaller := next(iter(best_layouts(start, 1)), None)) is not None:
            break
    return Shortage(
        whole=whole,
        gpus=next((each.machines.ranks for each in larger if any(fitting_layouts(each))), None),
        most_tried=counts[-1],
        smaller=smaller,
        changes=changes,
    )


def _counts(least: int) -> Iterator[int]:
    """Yield numbers of GPUs from ``least`` on: each one on a machine, then whole machines."""
    while True:
        if least > GPUS_PER_MACHINE:
            least = math.ceil(least / GPUS_PER_MACHINE) * GPUS_PER_MACHINE
        yield least
        least += 1
