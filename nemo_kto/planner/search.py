"""Search for layouts that fit and are fast, and for changes that make a run fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.layout import expert_rules, pipeline_rules, rank_rules
from nemo_kto.planner.plan_run import Plan, degrees, make_plan
from nemo_kto.planner.speed import GPUS_PER_MACHINE
from nemo_kto.utils.field_errors import echo

Values = dict[str, object]  # keys of the configuration, without "model." -> values
_FULL: Values = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}
_NONE: Values = dict.fromkeys(_FULL)
_RECOMPUTE = (_NONE, {**_NONE, "activations_checkpoint_granularity": "selective"}, _FULL)
_ROWS = (1, 2, 4)  # candidate numbers of rows of a micro-batch
_CHUNK = 2048  # minimum tokens: with shorter chunks, context-parallel ranks would wait for keys and values
_CHUNKS = (1, 2, 4)  # candidate numbers of model chunks of a pipeline stage


def layouts(plan: Plan) -> Iterator[Values]:
    """Yield the model settings of every layout of the same number of ranks that the rules allow.

    Tensor parallelism stays within a machine and is always combined with sequence parallelism, which has no extra cost.
    Context parallelism is considered only for long sequences. Partitions into stages are even; embedding and loss may each
    count as one layer.
    """
    ranks, architecture = plan.machines.ranks, plan.training.architecture
    of_row = plan.step.rows // plan.run.cfg.model.global_batch_size * plan.training.micro_batch_width
    for tensor, pipeline, context in product(_divisors(ranks), repeat=3):
        if ranks % (tensor * pipeline * context):
            continue
        experts = _expert_degrees(architecture, ranks // pipeline)
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
                **_NONE,
            }
            if _is_possible(plan, plan.run.with_model(**layout)):
                for recompute, rows in product(_RECOMPUTE, _ROWS):
                    yield {**layout, **recompute, "micro_batch_tokens": rows * of_row}


def _expert_degrees(architecture: Architecture, ranks: int) -> list[Values]:
    """Return the settings that partition whole experts over the ranks of a stage; one empty setting for a dense model."""
    if architecture.experts is None:
        return [{}]
    sizes = [size for size in _divisors(ranks) if architecture.experts.number % size == 0]
    return [{"expert_model_parallel_size": size, "expert_tensor_parallel_size": 1} for size in sizes]


def best_layouts(plan: Plan, count: int) -> list[Plan]:
    """Return the ``count`` fastest layouts that fit, one per combination of sizes; on a tie the larger micro-batch wins."""
    fitting = [found for values in layouts(plan) if (found := make_plan(plan.run.with_model(**values), plan.machines)).fits]
    best: dict[tuple[int, ...], Plan] = {}
    for found in sorted(fitting, key=lambda each: (each.speed.seconds, -each.training.micro_batch_tokens)):
        best.setdefault((*degrees(found.run.cfg.model), found.run.cfg.model.expert_model_parallel_size), found)
    return list(best.values())[:count]


def remedies(plan: Plan) -> list[str]:
    """Return alternative overrides that each make the run fit on the same ranks.

    There is at most one of each kind, the first in the order of increasing effect. If no single kind suffices, a combination
    of several is returned; if that does not suffice either, moments in bf16, or else LoRA.
    """
    model = plan.run.cfg.model
    one_row: Values = {"micro_batch_size": None, "micro_batch_tokens": plan.training.micro_batch_width}
    tensor: list[Values] = [
        {"tensor_model_parallel_size": model.tensor_model_parallel_size * by, "sequence_parallel": True} for by in (2, 4, 8)
    ]
    pipeline: list[Values] = [{"pipeline_model_parallel_size": model.pipeline_model_parallel_size * by} for by in (2, 4, 8)]
    context: list[Values] = [{"context_parallel_size": model.context_parallel_size * by} for by in (2, 4, 8)]

    def fits(change: Values) -> bool:
        run = _changed(plan.run, change)
        return _is_possible(plan, run) and make_plan(run, plan.machines).fits

    of_stage = plan.machines.ranks // plan.training.split.stages
    instances = model.optim.num_distributed_optimizer_instances
    experts = [each for each in _expert_degrees(plan.training.architecture, of_stage) if each]
    sharded: list[Values] = [{"optim.num_distributed_optimizer_instances": 1}] if instances > 1 else []
    together: list[Values] = [{**one, **other, **_FULL, **one_row} for one in ({}, *tensor) for other in ({}, *pipeline)]
    lora: Values = {"peft.peft_scheme": "lora"}
    narrow: list[Values] = []
    if model.optim.use_distributed_optimizer and not model.optim.offload_fraction:
        moments: Values = {"optim.moments_dtype": "bf16"}
        narrow = [moments, {**one_row, **moments}, {**_FULL, **one_row, **moments}]
    for kinds in (
        [sharded, [one_row], [_FULL], tensor, pipeline, context, experts],
        [together],
        [narrow],
        [[lora, {**_FULL, **one_row, **lora}]],
    ):
        found = [next(filter(fits, changes), None) for changes in kinds]
        if any(found):
            return [overrides(change) for change in found if change is not None]
    return []


def values_of(plan: Plan) -> Values:
    """Return the model settings that define the layout of a plan, without those that are null."""
    kinds = ("tensor_model", "pipeline_model", "virtual_pipeline_model")
    shared = ("context",) if plan.training.context_parallel > 1 else ()
    names = (*(f"{kind}_parallel_size" for kind in (*kinds, *shared)), "sequence_parallel", *_FULL, "micro_batch_tokens")
    if plan.training.split.counts_embedding or plan.training.split.counts_loss:
        names = (*names, *(f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")))
    if plan.training.architecture.experts is not None:
        names = (*names, "expert_model_parallel_size", "expert_tensor_parallel_size")
    values = {name: getattr(plan.run.cfg.model, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def overrides(values: Values) -> str:
    """Format model settings as command-line overrides, without those that are null."""
    return " ".join(f"model.{name}={echo(value)}" for name, value in values.items() if value is not None)


def _changed(run: ResolvedRun, values: Values) -> ResolvedRun:
    """Return the run with other model settings; a name with a dot is one in a section."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        section, _, inner = name.rpartition(".")
        if section:
            value = changes.get(section, getattr(run.cfg.model, section)).model_copy(update={inner: value})
        changes[section or name] = value
    return run.with_model(**changes)


def _is_possible(plan: Plan, run: ResolvedRun) -> bool:
    """Return whether the rules of a configuration allow the layout of a run, and its sequences are long enough for it."""
    model, architecture = run.cfg.model, plan.training.architecture
    tensor, _, context = degrees(model)
    broken_rules = chain(
        rank_rules(run, plan.machines.ranks),
        pipeline_rules(run, architecture.num_layers),
        expert_rules(run, *run.files.config),
    )
    is_long = context == plan.training.context_parallel or _are_long(plan, context)
    return is_long and tensor <= GPUS_PER_MACHINE and _divides_mlps(architecture, tensor) and not any(broken_rules)


def _are_long(plan: Plan, context: int) -> bool:
    """Return whether sequences are long enough for ``context`` context-parallel ranks."""
    return context == 1 or plan.training.micro_batch_width // (2 * context) >= _CHUNK


def _divides_mlps(architecture: Architecture, tensor: int) -> bool:
    """Return whether ``tensor`` divides the width of the MLPs; True if every layer has experts instead."""
    return all(architecture.sparse_layers) or architecture.ffn_hidden_size % tensor == 0


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
