"""The memory check of a run, and the settings with which a run that does not fit would."""

from __future__ import annotations

from itertools import chain
from typing import Any

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.layout_rules import expert_rules, mixer_rules, pipeline_rules, rank_rules
from nemo_kto.errors import UserError
from nemo_kto.memory.hardware import GPUS_PER_MACHINE, Machines
from nemo_kto.memory.run_plan import Plan, Values, degrees, make_plan, size
from nemo_kto.mixers.param_mapping import Layers
from nemo_kto.utils.fields import echo

FULL_RECOMPUTATION: Values = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}
NO_RECOMPUTATION: Values = dict.fromkeys(FULL_RECOMPUTATION)
LORA: Values = {"peft.peft_scheme": "lora"}
_CHUNK = 2048  # minimum tokens: with shorter chunks, context-parallel ranks would wait for keys and values


def check_memory(run: ResolvedRun, machines: Machines, *, longest: int | None = None) -> str | None:
    """Return a warning about a run that may not fit into memory; raise a UserError for one that cannot fit.

    Weights, gradients, optimizer state and a reference on the host do not depend on the data: if they alone exceed the
    memory, the run would certainly fail later. The memory of a pass is estimated for sequences of ``longest`` tokens; None
    before the rows have been read, for no warning.
    """
    if longest is not None:
        run = run.with_model(data=run.cfg.model.data.model_copy(update={"seq_length": longest}))
    plan = make_plan(run, machines)
    available = f"{size(machines.hardware.memory)} of {machines.hardware.name}"
    if plan.static > machines.hardware.memory:
        raise UserError(
            f"weights, gradients, optimizer and reference of this run need {size(plan.static)} for each rank, got "
            f"{available}; {remedy(plan)} (`nemo-kto plan {run.cfg.recipe.name}` with the same keys shows all of it)"
        )
    if longest is None or plan.fits:
        return None
    need = f"the run may need {size(plan.largest.device)} for each rank with its longest sequences, of {longest:,} tokens"
    return f"{need}, but has {available}; {remedy(plan)}"


def remedy(plan: Plan) -> str:
    """Return advice on a plan that does not fit, such as "use model.tensor_model_parallel_size=8"."""
    found = remedies(plan)
    return f"use {', or '.join(found)}" if found else "use more ranks, or a smaller model"


def remedies(plan: Plan, *, lora: bool = True) -> list[str]:
    """Return alternative overrides that each make the run fit on the same ranks.

    There is at most one of each kind, the first in the order of increasing effect. If no single kind suffices, a combination
    of several is returned; if that does not suffice either, moments in bf16, or else, with ``lora``, LoRA.
    """
    model = plan.run.cfg.model
    one_row: Values = {"micro_batch_size": None, "micro_batch_tokens": plan.training.micro_batch_width}
    tensor: list[Values] = [
        {"tensor_model_parallel_size": model.tensor_model_parallel_size * by, "sequence_parallel": True} for by in (2, 4, 8)
    ]
    pipeline: list[Values] = [{"pipeline_model_parallel_size": model.pipeline_model_parallel_size * by} for by in (2, 4, 8)]
    context: list[Values] = [{"context_parallel_size": model.context_parallel_size * by} for by in (2, 4, 8)]

    def fits(change: Values) -> bool:
        run = changed(plan.run, change)
        return is_possible(plan, run) and make_plan(run, plan.machines).fits

    of_stage = plan.machines.ranks // plan.training.split.stages
    instances = model.optim.num_distributed_optimizer_instances
    experts = [each for each in expert_degrees(plan.training.architecture, of_stage) if each]
    sharded: list[Values] = [{"optim.num_distributed_optimizer_instances": 1}] if instances > 1 else []
    together: list[Values] = [
        {**one, **other, **FULL_RECOMPUTATION, **one_row} for one in ({}, *tensor) for other in ({}, *pipeline)
    ]
    narrow: list[Values] = []
    if model.optim.use_distributed_optimizer and not model.optim.offload_fraction:
        moments: Values = {"optim.moments_dtype": "bf16"}
        narrow = [moments, {**one_row, **moments}, {**FULL_RECOMPUTATION, **one_row, **moments}]
    for kinds in (
        [sharded, [one_row], [FULL_RECOMPUTATION], tensor, pipeline, context, experts],
        [together],
        [narrow],
        [[LORA, {**FULL_RECOMPUTATION, **one_row, **LORA}] if lora else []],
    ):
        found = [next(filter(fits, changes), None) for changes in kinds]
        if any(found):
            return [overrides(change) for change in found if change is not None]
    return []


def expert_degrees(architecture: Architecture, ranks: int) -> list[Values]:
    """Return the settings that partition whole experts over the ranks of a stage; one empty setting for a dense model."""
    if architecture.experts is None:
        return [{}]
    sizes = [size for size in divisors(ranks) if architecture.experts.number % size == 0]
    return [{"expert_model_parallel_size": size, "expert_tensor_parallel_size": 1} for size in sizes]


def overrides(values: Values) -> str:
    """Format model settings as command-line overrides, without those that are null."""
    return " ".join(f"model.{name}={echo(value)}" for name, value in values.items() if value is not None)


def changed(run: ResolvedRun, values: Values) -> ResolvedRun:
    """Return the run with other model settings; a name with a dot is one in a section."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        section, _, inner = name.rpartition(".")
        if section:
            value = changes.get(section, getattr(run.cfg.model, section)).model_copy(update={inner: value})
        changes[section or name] = value
    return run.with_model(**changes)


def is_possible(plan: Plan, run: ResolvedRun) -> bool:
    """Return whether the rules of a configuration allow the layout of a run, and its sequences are long enough for it."""
    model, architecture = run.cfg.model, plan.training.architecture
    tensor, _, context = degrees(model)
    broken_rules = chain(
        rank_rules(run, plan.machines.ranks),
        pipeline_rules(run, architecture.num_layers),
        expert_rules(run, *run.files.config),
        mixer_rules(run),
    )
    is_long = context in (1, plan.training.context_parallel) or plan.training.micro_batch_width // (2 * context) >= _CHUNK
    divides_mlps = not any(architecture.layers_with[Layers.DENSE]) or architecture.ffn_hidden_size % tensor == 0
    return is_long and tensor <= GPUS_PER_MACHINE and divides_mlps and not any(broken_rules)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in increasing order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
