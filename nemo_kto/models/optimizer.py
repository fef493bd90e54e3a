"""megatron-core's data-parallel wrapper, optimizer and schedule, from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

# Names of the schedules, as NeMo's configurations spell them, and what megatron-core calls them.
SCHEDULES = {"CosineAnnealing": "cosine", "LinearAnnealing": "linear", "constant": "constant"}


def wrap_data_parallel(chunks: Sequence[MegatronModule], *, use_distributed_optimizer: bool) -> list[MegatronModule]:
    """Wrap model chunks in megatron-core's DistributedDataParallel.

    Gradients are summed in fp32 over the data-parallel group; dividing by the number of examples of the global batch is left
    to ``finalize_model_grads``, which knows that number. A gradient that is not finite stops the rank that has it.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        check_for_nan_in_grad=True,
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(config=chunk.config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(
    *,
    chunks: Sequence[MegatronModule],
    lr: float,
    min_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    clip_grad: float,
    params_dtype: torch.dtype,
    use_distributed_optimizer: bool,
) -> MegatronOptimizer:
    """AdamW over the chunks of this rank; in bf16 the optimizer keeps fp32 main weights.

    Args:
        chunks: wrapped by :func:`wrap_data_parallel`.
        clip_grad: largest norm of the whole gradient; 0 switches clipping off (the norm is still measured).
        use_distributed_optimizer: shard main weights and moments over the data-parallel group (ZeRO-1).
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=min_lr,
        weight_decay=weight_decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        clip_grad=clip_grad,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, list(chunks))


def build_scheduler(
    *,
    optimizer: MegatronOptimizer,
    name: str,
    lr: float,
    min_lr: float,
    warmup_steps: int,
    constant_steps: int,
    max_steps: int,
    weight_decay: float,
) -> OptimizerParamScheduler:
    """The learning rate of each of ``max_steps`` steps, the last ``constant_steps`` at ``min_lr``.

    ``name`` is a key of :data:`SCHEDULES`.

    The trainer advances the schedule before the optimizer steps, so step k (from 1) of a warm-up over w steps learns with
    ``lr * k / w``: the first step is not lost, and the last step of the run arrives at ``min_lr``.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(max_steps - constant_steps, warmup_steps + 1),
        lr_decay_style=SCHEDULES[name],
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
