"""Estimate the memory and the speed of a run from its configuration, before anything is built."""

from __future__ import annotations

import functools
import logging
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.artifacts.checkpoint_files import config_folder
from nemo_kto.config.choices import (
    adapter_settings,
    choose_mode,
    has_new_kl_examples,
    pipeline_split,
    recompute_modules,
    reference_passes,
)
from nemo_kto.config.rules.training import local_ranks, world_size
from nemo_kto.config.schema import GPTConfig, RunConfig
from nemo_kto.device import device
from nemo_kto.device.dtypes import DTYPES, MOMENTS
from nemo_kto.device.precision import PRECISIONS, bf16_support, product_flops
from nemo_kto.errors import UserError
from nemo_kto.planner.hardware import DEFAULT_GPU, GPUS, Hardware, known_gpu
from nemo_kto.planner.memory import RankMemory, Training, stages_memory
from nemo_kto.planner.speed import Speed, step_speed
from nemo_kto.planner.traffic import Step
from nemo_kto.run.rows import micro_batch_limits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines of a run.

    Attributes:
        ranks: total number of ranks.
        hardware: device of each rank; its memory is that of one rank.
        on_gpu: the device is a GPU.
    """

    ranks: int
    hardware: Hardware
    on_gpu: bool

    def with_memory(self, memory: float) -> Machines:
        """Return the same machines with another memory size per rank."""
        return replace(self, hardware=replace(self.hardware, memory=memory))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimated needs of a run on given machines.

    Attributes:
        cfg: the configuration, with a precision other than auto.
        stages: memory of a rank of each pipeline stage.
    """

    cfg: RunConfig
    machines: Machines
    training: Training
    step: Step
    stages: list[RankMemory]

    @property
    def largest(self) -> RankMemory:
        """Memory of the rank that needs the most."""
        return max(self.stages, key=lambda memory: memory.device)

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the memory of each rank."""
        return self.largest.device <= self.machines.hardware.memory

    @property
    def certain(self) -> float:
        """Bytes that a rank needs independently of the data: the maximum on GPUs, the mean if ranks share a memory."""
        needs = [memory.certain for memory in self.stages]
        return max(needs) if self.machines.on_gpu else sum(needs) / len(needs)

    @functools.cached_property
    def speed(self) -> Speed:
        """Estimated speed of a step."""
        return step_speed(self.training, self.step, self.machines.hardware)


def make_plan(cfg: RunConfig, machines: Machines) -> Plan:
    """Build the plan of a run, whose layout must fit the number of ranks.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    model = cfg.model
    tensor, pipeline, context = degrees(model)
    architecture = _architecture(cfg.pretrained_checkpoint.restore_from_path)
    data = machines.ranks // (tensor * pipeline * context)
    limits, answers = micro_batch_limits(cfg, on_gpu=machines.on_gpu), 2 if cfg.recipe.unit == "pairs" else 1
    width = limits.width(model.data.seq_length)
    prompts = max(1, min(limits.fitting(width, answers=answers), model.global_batch_size // data))
    mode, _ = choose_mode(cfg)
    training = Training(
        architecture=replace(
            architecture,
            tensor_parallel=tensor,
            expert_tensor_parallel=model.expert_tensor_parallel_size or tensor,
        ),
        element_bytes=DTYPES[cfg.trainer.precision].itemsize,
        fp8=model.fp8 is not None,
        split=pipeline_split(model),
        data_parallel=data,
        context_parallel=context,
        expert_parallel=model.expert_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        adapters=adapter_settings(model.peft),
        distributed_optimizer=model.optim.use_distributed_optimizer,
        moment_bytes=MOMENTS[model.optim.moments_dtype].itemsize,
        offload=model.optim.offload_fraction,
        swapped=_swapped(cfg, mode),
        reference_moves=model.reference.sync_interval > 0,
        async_save=cfg.exp_manager.checkpoint_callback_params.async_save,
        recompute=model.activations_checkpoint_granularity,
        recompute_modules=recompute_modules(model),
        recompute_method=model.activations_checkpoint_method,
        recompute_layers=model.activations_checkpoint_num_layers,
        micro_batch_tokens=prompts * answers * width,
        micro_batch_width=width,
        packed=model.data.packing,
        micro_batches=math.ceil(model.global_batch_size / data / prompts),
        logprob_chunk=model.logprob_chunk_size,
        largest_file=_largest_file(cfg.pretrained_checkpoint.restore_from_path),
        on_gpu=machines.on_gpu,
    )
    live, disabled = reference_passes(cfg)
    with_kl = cfg.loss.record.needs_z0  # both the policy and a live reference evaluate the KL examples
    step = Step(
        rows=model.global_batch_size * answers,
        width=width,
        forward_only=(live + disabled) * (1 + with_kl) + with_kl + cfg.loss.record.looks_ahead,
        disabled=disabled * (1 + with_kl),
    )
    return Plan(cfg=cfg, machines=machines, training=training, step=step, stages=stages_memory(training))


def degrees(model: GPTConfig) -> tuple[int, int, int]:
    """Return the tensor-, pipeline- and context-parallel sizes."""
    return model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size


def gpus_elsewhere(ranks: int, gpu: str) -> Machines:
    """Return machines with ``ranks`` GPUs of a kind that planner/hardware.py lists under the short name ``gpu``."""
    return Machines(ranks=ranks, hardware=GPUS[gpu], on_gpu=True)


def these_machines(cfg: RunConfig, *, ranks: int | None = None, local: int | None = None, timed: bool = True) -> Machines:
    """Return the machines of a run that is started on this machine.

    The ranks of a machine without GPUs share its memory and its processors.

    Args:
        cfg: configuration with a precision other than auto.
        ranks: number of ranks that are already running; None to use that of the configuration.
        local: number of ranks on this machine; None to use that of the configuration.
        timed: time a matrix product on a CPU, which an estimate of the speed needs.
    """
    gpus = 0 if cfg.trainer.accelerator == "cpu" else device.device_count()
    ranks = world_size(cfg.trainer, gpus=gpus, world=None) if ranks is None else ranks
    local = local_ranks(cfg.trainer, gpus) if local is None else local
    if gpus:
        name, memory = device.device_name(), float(device.total_memory_bytes())
        known = known_gpu(name) or GPUS[DEFAULT_GPU]
        return Machines(ranks=ranks, hardware=replace(known, name=name, memory=memory), on_gpu=True)
    dtype, threads = DTYPES[cfg.trainer.precision], max(1, len(os.sched_getaffinity(0)) // local)
    hardware = Hardware(
        name="this machine" if local == 1 else f"this machine, shared by {local} ranks",
        memory=device.host_memory_bytes() / local,
        flops={dtype.itemsize: product_flops(dtype, threads=threads)} if timed else {},
        measured=True,
    )
    return Machines(ranks=ranks, hardware=hardware, on_gpu=False)


def with_precision(cfg: RunConfig, *, on_gpu: bool | None = None) -> RunConfig:
    """Return the configuration with trainer.precision bf16 or 32; auto is resolved for GPUs, or for this machine."""
    precision = PRECISIONS[cfg.trainer.precision]
    if precision == "auto":
        precision = "bf16" if on_gpu or bf16_support().native else "32"
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"precision": precision})})


def check_memory(cfg: RunConfig, machines: Machines) -> None:
    """Raise an error for a run that cannot fit into memory, and log a warning for one that may not fit.

    Weights, gradients, optimizer state and a reference on the host do not depend on the data: if they alone exceed the
    memory, the run would certainly fail later. The memory of a pass depends on the actual length of the sequences.

    Raises:
        UserError: the run cannot fit.
    """
    plan = make_plan(cfg, machines)
    there = f"{size(machines.hardware.memory)} of {machines.hardware.name}"
    if plan.certain > machines.hardware.memory:
        raise UserError(
            f"weights, gradients, optimizer and reference of this run need {size(plan.certain)} for each rank, got {there}; "
            f"{remedy(plan)} (`nemo-kto plan {cfg.recipe.name}` with the same keys shows all of it)"
        )
    if not plan.fits:
        text = "the run may need %s for a rank if its rows are as long as model.data.seq_length, got %s; %s"
        logger.warning(text, size(plan.largest.device), there, remedy(plan))


def remedy(plan: Plan) -> str:
    """Return advice on a plan that does not fit, such as "use model.tensor_model_parallel_size=8"."""
    from nemo_kto.planner.search import remedies

    found = remedies(plan)
    return f"use {', or '.join(found)}" if found else "use more ranks, or a smaller model"


def with_model(cfg: RunConfig, **values: Any) -> RunConfig:
    """Return the configuration with other values in its model section."""
    return cfg.model_copy(update={"model": cfg.model.model_copy(update=values)})


def size(count: float) -> str:
    """Format a number of bytes; 1 GB is 10^9 bytes."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _swapped(cfg: RunConfig, mode: str) -> str | None:
    """Return which weights have a copy on the host ("all" or "trained"); None if there is no copy.

    The copy holds the reference, or the policy while the reference is evaluated.
    """
    adapted = cfg.model.peft.peft_scheme != "none"
    if mode == "cached" and has_new_kl_examples(cfg) and (not adapted or cfg.model.reference.restore_from_path is not None):
        return "all"
    if mode == "swap":
        return "trained" if adapted and cfg.model.reference.restore_from_path is None else "all"
    # the reference is the model with the adapters with which training starts
    return "trained" if mode == "adapter" and cfg.model.peft.restore_from_path is not None else None


@functools.cache
def _largest_file(source: str) -> int:
    return max((file.stat().st_size for file in Path(source).glob("*.safetensors")), default=0)


@functools.cache
def _architecture(source: str) -> Architecture:
    return read_architecture(config_folder(Path(source)), tensor_parallel=1)
