"""The plan of a run: its micro-batches, steps and memory, estimated before anything is built; what makes a run fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.layout_rules import expert_rules, mixer_rules, pipeline_rules, quantize_rules, rank_rules
from nemo_kto.config.schema import GPTConfig
from nemo_kto.device.precision import PRECISIONS, bf16_support, dtype_of
from nemo_kto.errors import UserError
from nemo_kto.memory.hardware import GPUS_PER_MACHINE, Machines, known_gpu
from nemo_kto.memory.micro_batches import (
    MEAN_LENGTH,
    MIN_TOKENS,
    SEPARATE,
    SharedPrompts,
    micro_batch_limits,
    sufficient_tokens,
)
from nemo_kto.memory.rank_memory import RankMemory, Training, stages_memory
from nemo_kto.mixers.param_mapping import Layers
from nemo_kto.models.engine.sequences import MicroBatchLimits
from nemo_kto.utils.fields import echo

Values = dict[str, object]  # keys of the configuration, without "model." -> values
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
# Part of the memory of a GPU that a run may need by the estimate with the reference in it, and with the default number of
# tokens of a micro-batch. The rest is a reserve: an allocation that fails would end the run, and a swap from host memory or
# a smaller micro-batch costs a few percent of a step.
ROOM = 0.9
FULL_RECOMPUTATION: Values = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}
NO_RECOMPUTATION: Values = dict.fromkeys(FULL_RECOMPUTATION)
LORA: Values = {"peft.peft_scheme": "lora"}
NF4: Values = {"quantize": "nf4"}
_CHUNK = 2048  # minimum tokens: with shorter chunks, context-parallel ranks would wait for keys and values


@dataclass(frozen=True, kw_only=True)
class Step:
    """Passes through the model in a step."""

    rows: int  # sequences of the global batch, each with a forward and a backward pass
    width: int  # tokens per sequence: the mean over the rows, or the maximum before they are read
    micro_batches: int  # of a data-parallel rank, of rows of this length
    answer: int | None = None  # tokens per sequence whose log-prob is computed; None for all but the first
    # Forward passes without gradient, each over ``rows`` sequences: for KL examples, for a loss that looks ahead, and for a
    # reference that is evaluated.
    forward_only: int
    disabled: int = 0  # of these, passes of a reference that is the model with adapters disabled
    # Fractions of the tokens and of the FLOPs of separate sequences that are computed: below 1 if answers share prompts.
    computed_tokens: float = 1.0
    computed_flops: float = 1.0

    @property
    def tokens(self) -> int:
        """Number of tokens that are trained on."""
        return self.rows * self.width

    @property
    def computed(self) -> float:
        """Number of tokens of a pass, on average over the passes of a step."""
        return self.tokens * self.computed_tokens

    @property
    def answers(self) -> int:
        """Number of tokens whose log-prob is computed."""
        return self.rows * (self.width - 1 if self.answer is None else self.answer)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimated needs of a run on given machines."""

    run: ResolvedRun  # with a precision other than auto
    machines: Machines
    training: Training
    step: Step
    stages: list[RankMemory]  # memory of a rank of each pipeline stage
    limits: MicroBatchLimits
    shared: SharedPrompts | None = None  # None if the rows are not known
    steps: int | None = None  # of the whole run; None if the rows are not known
    fixed: Values = field(default_factory=dict)  # model settings that a search for layouts keeps

    @property
    def largest(self) -> RankMemory:
        """Memory of the rank that needs the most."""
        return max(self.stages, key=lambda memory: memory.device)

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the memory of each rank."""
        return self.largest.device <= self.machines.hardware.memory

    @property
    def static(self) -> float:
        """Bytes that a rank needs independently of the data: the maximum on GPUs, the mean if ranks share a memory."""
        needs = [memory.static for memory in self.stages]
        return max(needs) if self.machines.on_gpu else sum(needs) / len(needs)


def make_plan(run: ResolvedRun, machines: Machines) -> Plan:
    """Build the plan of a run, whose layout must fit the number of ranks; raises UserError if config.json is unreadable.

    On GPUs it chooses the number of tokens of a micro-batch, unless the user has set a limit or the run has one already: the
    sufficient number, halved until the estimate leaves a reserve of memory. A reference that fits into GPU memory with a
    smaller micro-batch has priority.
    """
    model = run.cfg.model
    if not machines.on_gpu or run.micro_batch_tokens or model.micro_batch_size or model.micro_batch_tokens:
        return _plan(run, machines)
    context = model.context_parallel_size
    smallest = _plan(run.with_micro_batch_tokens(MIN_TOKENS * context, ""), machines)
    training, step = smallest.training, smallest.step
    longest = step.rows * training.micro_batch_width / training.replicas
    counted = None if run.row_tokens is None else step.tokens / training.replicas
    wanted, reason = sufficient_tokens(training, longest=longest, counted=counted)
    plans, number = [smallest], MIN_TOKENS
    while number < wanted:
        number *= 2
        plans.append(_plan(run.with_micro_batch_tokens(number * context, reason), machines))
    known = known_gpu(machines.hardware.name) or machines.hardware  # drivers report a little more than the data sheet
    room = ROOM * min(machines.hardware.memory, known.memory)
    fitting = [index for index, plan in enumerate(plans) if plan.largest.device <= room]
    best = max(fitting, key=lambda index: (plans[index].training.reference_on_gpu, index), default=0)
    chosen = plans[best].run
    if best + 1 in fitting:
        reason = "with twice as many, the reference would not fit into GPU memory"
    elif best + 1 < len(plans):
        needed = plans[best + 1].largest.device
        reason = f"twice as many would need an estimated {size(needed)} of {size(machines.hardware.memory)}"
    return replace(plans[best], run=chosen.with_micro_batch_tokens(chosen.micro_batch_tokens, reason))


def with_shared_prompts(plan: Plan, shared: SharedPrompts) -> Plan:
    """Return the plan of the same run with prompts that are shared as in the rows that were measured."""
    return replace(_plan(plan.run, plan.machines, shared), shared=shared)


def bubble_of_shorter_rows(plan: Plan) -> float:
    """Return the pipeline bubble with rows of the mean length that is assumed before they are read."""
    of_row = plan.step.tokens / plan.run.cfg.model.global_batch_size
    step = _plan(plan.run.with_row_tokens(MEAN_LENGTH * of_row), plan.machines).step
    return plan.training.split.bubble(step.micro_batches)


def size_micro_batches(run: ResolvedRun, machines: Machines) -> tuple[int | None, str]:
    """Return the default number of tokens of a micro-batch, of all context-parallel ranks together, and why.

    It is None if the user has set a limit, or without GPUs.
    """
    chosen = make_plan(run, machines).run
    return chosen.micro_batch_tokens, chosen.micro_batch_reason


def _plan(run: ResolvedRun, machines: Machines, shared: SharedPrompts = SEPARATE) -> Plan:
    cfg, model = run.cfg, run.cfg.model
    tensor, pipeline, context = degrees(model)
    data = machines.ranks // (tensor * pipeline * context)
    limits, answers = micro_batch_limits(run, on_gpu=machines.on_gpu), 2 if cfg.recipe.has_pairs else 1
    width = limits.width(cfg.seq_length)
    limits = replace(limits, packed=limits.packed or shared.trained < 1)
    share = model.global_batch_size // data
    tokens, prompts = _micro_batch(limits, shared, share=share, width=width, answers=answers)
    training = Training(
        architecture=run.architecture,
        element_bytes=run.dtype.itemsize,
        fp8=model.fp8 is not None,
        split=run.split,
        data_parallel=data,
        context_parallel=context,
        expert_parallel=model.expert_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        adapters=run.adapters,
        distributed_optimizer=model.optim.use_distributed_optimizer,
        optimizer_instances=model.optim.num_distributed_optimizer_instances,
        gradient_bytes=4 if model.optim.grad_reduce_in_fp32 else run.dtype.itemsize,
        moment_bytes=dtype_of(model.optim.moments_dtype).itemsize,
        offload=model.optim.offload_fraction,
        swapped=run.swapped_weights,
        reference_moves=model.reference.sync_interval > 0,
        async_save=cfg.exp_manager.checkpoint_callback_params.async_save,
        recompute=model.activations_checkpoint_granularity,
        recompute_modules=run.recompute_modules,
        recompute_method=run.recompute_method,
        recompute_layers=run.recompute_num_layers,
        micro_batch_tokens=tokens,
        micro_batch_width=width,
        packed=limits.packed,
        repeats_keys=machines.repeats_keys,
        micro_batches=math.ceil(share / prompts),
        logprob_chunk=model.logprob_chunk_size,
        logprob_summands=model.logprob_gradient_summands,
        largest_file=run.files.largest_file,
        on_gpu=machines.on_gpu,
    )
    mean = width if run.row_tokens is None else max(2, math.ceil(run.row_tokens / answers))
    _, mean_prompts = _micro_batch(limits, shared, share=share, width=mean, answers=answers)
    step = _step(
        run, shared, rows=model.global_batch_size * answers, width=mean, micro_batches=math.ceil(share / mean_prompts)
    )
    stages = stages_memory(training)
    plan = Plan(run=run, machines=machines, training=training, step=step, stages=stages, limits=limits)
    if not machines.on_gpu or not run.swaps_reference or "cpu" in (model.reference.device, run.reference_memory):
        return plan
    training = replace(training, reference_on_gpu=True)
    with_reference = replace(plan, training=training, stages=stages_memory(training))
    has_room = with_reference.largest.device <= ROOM * machines.hardware.memory
    return with_reference if run.reference_on_gpu or has_room else plan


def _step(run: ResolvedRun, shared: SharedPrompts, *, rows: int, width: int, micro_batches: int) -> Step:
    """Return the work of a step with rows of ``width`` tokens."""
    live, disabled = run.reference_passes
    with_kl = run.cfg.loss.definition.needs_z0  # both the policy and a live reference evaluate the KL examples
    return Step(
        rows=rows,
        width=width,
        micro_batches=micro_batches,
        forward_only=(live + disabled) * (1 + with_kl) + with_kl + run.cfg.loss.definition.looks_ahead,
        disabled=disabled * (1 + with_kl),
        computed_tokens=shared.tokens,
        computed_flops=shared.flops,
    )


def _micro_batch(
    limits: MicroBatchLimits, shared: SharedPrompts, *, share: int, width: int, answers: int
) -> tuple[int, int]:
    """Return the tokens and the prompts of a full micro-batch of sequences of ``width`` tokens.

    ``share`` is the number of prompts of a data-parallel rank. A pack is filled up to the limit of tokens with shorter
    sequences too. Shared prompts make a micro-batch smaller if the number of prompts limits it; otherwise there are fewer.
    """
    each, most = answers * width, min(share, limits.prompts or share)
    if not limits.packed:
        prompts = max(1, min(limits.fitting(width, answers=answers), share))
        return prompts * each, prompts
    tokens = math.ceil(most * each * shared.largest)
    if limits.tokens is not None:
        tokens = min(tokens, max(limits.tokens, math.ceil(each * shared.largest)))
    return tokens, max(1, min(most, int(tokens / (each * shared.trained) + 1e-6)))


def place_reference(run: ResolvedRun, machines: Machines, *, longest: int) -> tuple[str, str]:
    """Return where swapped weights of the reference are stored, "gpu" or "cpu", and why.

    The memory is estimated for sequences of ``longest`` tokens.
    """
    if (name := run.cfg.model.reference.device) != "auto":
        return name, "set by the user"
    if not machines.on_gpu:
        return "cpu", "no GPU"
    data = run.cfg.model.data.model_copy(update={"seq_length": longest})
    plan = make_plan(run.with_model(data=data), machines)
    available = f"{size(machines.hardware.memory)} of {machines.hardware.name}"
    if plan.training.reference_on_gpu:
        return "gpu", f"the run needs an estimated {size(plan.largest.device)} of {available}"
    needed = plan.largest.device + plan.largest.reference
    return "cpu", f"with it, the run would need an estimated {size(needed)}, with {available}"


def degrees(model: GPTConfig) -> tuple[int, int, int]:
    """Return the tensor-, pipeline- and context-parallel sizes."""
    return model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size


def with_precision(run: ResolvedRun, *, on_gpu: bool) -> ResolvedRun:
    """Return the run with trainer.precision bf16 or 32; auto is resolved for GPUs, or for this machine."""
    precision = PRECISIONS[run.cfg.trainer.precision]
    if precision == "auto":
        precision = "bf16" if on_gpu or bf16_support().native else "32"
    return run.with_precision(precision, run.precision_reason)


def size(count: float) -> str:
    """Format a number of bytes; 1 GB is 10^9 bytes."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


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
    of several is returned; if that does not suffice either, moments in bf16, or else, with ``lora``, what
    :func:`smaller_training` lists.
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
        *([[change, {**FULL_RECOMPUTATION, **one_row, **change}]] for change in smaller_training(plan.run) if lora),
    ):
        found = [next(filter(fits, changes), None) for changes in kinds]
        if any(found):
            return [overrides(change) for change in found if change is not None]
    return []


def smaller_training(run: ResolvedRun) -> list[Values]:
    """Return the settings with which less is trained or kept, the smallest change first: LoRA, then a quantized base too."""
    lora = [] if run.has_adapters else [LORA]
    return lora if run.cfg.model.quantize else [*lora, {**NF4, **(lora[0] if lora else {})}]


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
        quantize_rules(run),
    )
    is_long = context in (1, plan.training.context_parallel) or plan.training.micro_batch_width // (2 * context) >= _CHUNK
    divides_mlps = not any(architecture.layers_with[Layers.DENSE]) or architecture.ffn_hidden_size % tensor == 0
    return is_long and tensor <= GPUS_PER_MACHINE and divides_mlps and not any(broken_rules)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in increasing order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
