"""Build megatron-core's data-parallel wrapper, optimizer and learning-rate schedule from plain settings; AdamW in bf16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.optim.adamw import adamw

from nemo_kto.distributed import state
from nemo_kto.distributed.gradients import add_products_to_main_grads, expect_whole_weights, schedule_reductions

# Names of the learning-rate schedules -> megatron-core's decay styles. Schedules that NeMo has are spelled as in NeMo.
SCHEDULES = {
    "CosineAnnealing": "cosine",
    "CosineWithRestarts": "cosine",
    "LinearAnnealing": "linear",
    "WSD": "WSD",
    "constant": "constant",
}


def wrap_data_parallel(
    chunks: Sequence[MegatronModule], *, use_distributed_optimizer: bool, overlap: bool = False, reduce_in_fp32: bool = True
) -> list[MegatronModule]:
    """Wrap model chunks in megatron-core's DistributedDataParallel.

    Gradients are summed over the micro-batches and the data-parallel group, in fp32 or in the dtype of the weights;
    ``finalize_model_grads`` divides them by the number of examples of the global batch. With ``overlap``, gradients are
    summed during the backward pass, and sharded weights gathered during the forward pass; the model must be run by a
    ``LogProbEngine``, or by one of megatron-core's schedules. With several optimizer instances
    (:class:`nemo_kto.distributed.state.Layout`), gradients are scattered over the ranks of an instance, then summed over the
    instances; weights are gathered within an instance.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=reduce_in_fp32,
        use_distributed_optimizer=use_distributed_optimizer,
        check_for_nan_in_grad=False,  # would stop only the rank with such gradients; see SkippingOptimizer
        average_in_collective=False,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and use_distributed_optimizer,
        num_distributed_optimizer_instances=state.optimizer_instances(),
    )
    wrapped = [
        DistributedDataParallel(config=chunk.config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        add_products_to_main_grads(chunk, reduce_in_fp32=reduce_in_fp32)
    if overlap:
        schedule_reductions(wrapped)
        expect_whole_weights(wrapped)
    return wrapped


class SkippingOptimizer(ChainedOptimizer):
    """megatron-core's optimizer, extended to skip a step whose gradient is not finite.

    A skipped step leaves weights, moments and step counters unchanged, and ``step`` returns False with the norm. The norm is
    the same on every rank, so either all ranks skip a step or none does. megatron-core itself checks only with loss scaling,
    in fp16.
    """

    def get_grad_norm(self) -> float:
        """Return the L2 norm of the whole gradient, over all ranks.

        Each optimizer instance computes it from the same gradient. They agree on one value, because a difference in
        rounding would make their weights differ.
        """
        self._norm = state.max_over_optimizer_instances(float(super().get_grad_norm()))
        return self._norm

    def step_with_ready_grads(self) -> bool:
        """Apply the gradient; return False if it is not finite."""
        return math.isfinite(self._norm) and bool(super().step_with_ready_grads())


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
    use_distributed_optimizer: bool,  # shards main weights and moments over the data-parallel group (ZeRO-1)
    moments_dtype: torch.dtype = torch.float32,
    offload_fraction: float = 0.0,
) -> MegatronOptimizer:
    """Build AdamW for the chunks of this rank; in bf16 the optimizer keeps fp32 main weights.

    Args:
        clip_grad: maximum norm of the whole gradient; 0 disables clipping (the norm is still measured).
        moments_dtype: fp32; or bf16, which requires the distributed optimizer; the arithmetic is still in fp32.
        offload_fraction: fraction of the main weights and moments that is stored and updated in the host memory of a GPU;
            requires the distributed optimizer, weights in bf16 and moments in fp32.
    """
    state_options: dict[str, Any] = {}
    if offload_fraction:
        state_options = {
            "use_precision_aware_optimizer": True,  # without it, the main weights would be on the GPU as well
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
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
        **state_options,
    )
    # biases and norms have no weight decay; norms with weights of each head are matrices, which it would apply to
    overrides = get_standard_config_overrides(config)
    overrides[ParamKey(name=("*.q_layernorm.weight", "*.k_layernorm.weight"))] = {"wd_mult": 0.0}
    # Experts have a separate optimizer. If only experts are trained, the optimizer of the other weights is empty.
    optimizer = get_megatron_optimizer(
        config, list(chunks), config_overrides=overrides, use_gloo_process_groups=state.uses_gloo_groups()
    )
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    if moments_dtype == torch.bfloat16:
        for part in parts:
            part.optimizer = with_bf16_moments(part.optimizer)
    fuse_torch_adam(part.optimizer for part in parts)
    return SkippingOptimizer(parts)


def fuse_torch_adam(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make torch's AdamW update all weights in one kernel, with its step counters on the device; others are unchanged.

    It is used without Transformer Engine and apex; megatron-core constructs it without this option. It would otherwise run a
    dozen kernels, on a GPU on lists of all weights, and create an fp32 tensor for each weight.
    """
    for adam in optimizers:
        if isinstance(adam, torch.optim.Adam):  # AdamW is a subclass
            for group in adam.param_groups:
                group.update(fused=True, foreach=False)


class CosineRestartsScheduler(OptimizerParamScheduler):
    """Cosine schedule with warm restarts: ``cycles`` decays from the full learning rate, each over the same number of steps.

    SGDR with cycles of equal length (Loshchilov and Hutter 2017, https://openreview.net/pdf?id=Skq89Scxx), which
    megatron-core lacks. The step at the end of a cycle is the first of the next one; only the last cycle reaches ``min_lr``.
    """

    def __init__(self, *, cycles: int, **settings: Any) -> None:  # settings: arguments of the base class
        self.cycles = cycles  # set first, because the constructor of the base class calls get_lr
        super().__init__(**settings)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        done, length = self.num_steps - self.lr_warmup_steps, self.lr_decay_steps - self.lr_warmup_steps
        if not 0 < done < length:
            return float(super().get_lr(param_group))
        highest, lowest = (float(param_group.get(name, getattr(self, name))) for name in ("max_lr", "min_lr"))
        fraction = self.cycles * done % length / length  # fraction of the current cycle; exact, as these are integers
        return lowest + 0.5 * (1.0 + math.cos(math.pi * fraction)) * (highest - lowest)


def build_scheduler(
    *,
    optimizer: MegatronOptimizer,
    name: str,  # a key of SCHEDULES
    lr: float,
    min_lr: float,
    warmup_steps: int,
    constant_steps: int,
    max_steps: int,
    weight_decay: float,
    wsd_decay_steps: int | None = None,  # only for WSD (warm-up, stable, decay): number of steps of the decay to ``min_lr``
    wsd_decay_style: str | None = None,  # only for WSD: linear, cosine, exponential or minus_sqrt
    cycles: int | None = None,  # only for CosineWithRestarts
) -> OptimizerParamScheduler:
    """Build the learning-rate schedule of ``max_steps`` steps, the last ``constant_steps`` of them at ``min_lr``.

    The trainer advances the schedule before the optimizer steps, so step k (from 1) of a warm-up over w steps uses the
    learning rate ``lr * k / w``: the first step has a rate above 0, and the last step of the run reaches ``min_lr``.
    """
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "init_lr": 0.0,
        "max_lr": lr,
        "min_lr": min_lr,
        "lr_warmup_steps": warmup_steps,
        "lr_decay_steps": max(max_steps - constant_steps, warmup_steps + 1),
        "lr_decay_style": SCHEDULES[name],
        "wsd_decay_steps": wsd_decay_steps,
        "lr_wsd_decay_style": wsd_decay_style,
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": True,
    }
    return OptimizerParamScheduler(**settings) if cycles is None else CosineRestartsScheduler(cycles=cycles, **settings)


MOMENTS = ("exp_avg", "exp_avg_sq")
_VALUES = 1 << 24  # values of a parameter that are updated at a time, so that fp32 copies of their moments take 128 MiB


class Bf16MomentsAdamW(torch.optim.AdamW):
    """torch's AdamW, except that moments are rounded to bf16 after each update.

    A moment is converted to fp32 for the update, in slices. The state has the names of torch's AdamW.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _update(self, group: Mapping[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter] or self.create_state(group, parameter)
        assert parameter.grad is not None
        tensors = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
        for value, grad, *moments in zip(*(tensor.view(-1).split(_VALUES) for tensor in tensors), strict=True):
            wide = [moment.float() for moment in moments]
            adamw(
                [value],
                [grad],
                [wide[0]],
                [wide[1]],
                [],
                [state["step"].clone()],  # which adamw increments
                foreach=False,
                fused=group["fused"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for moment, result in zip(moments, wide, strict=True):
                moment.copy_(result)
        state["step"] += 1

    def create_states(self) -> None:
        """Create the state of all parameters as before the first step, without the gradients that a step needs."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.create_state(group, parameter)

    def create_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Create and return the state of a parameter: moments of zero, and a step counter where torch's kernel reads it."""
        counter = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        moments = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
        self.state[parameter] = {"step": counter, **moments}
        return self.state[parameter]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class or of torch's AdamW; moments in bf16 are not copied.

        torch would convert all moments to fp32, twice their memory.
        """
        counters = {number: {"step": kept["step"]} for number, kept in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": counters})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in counters:
                for name in MOMENTS:
                    moment = state_dict["state"][number][name]
                    self.state[parameter][name] = moment.to(parameter.device, torch.bfloat16)


def with_bf16_moments(optimizer: torch.optim.Optimizer) -> Bf16MomentsAdamW:
    """Return an optimizer with the parameters and settings of another AdamW, torch's or a fused one, without its state.

    The parameters may be views of other tensors, as those of megatron-core's distributed optimizer.
    """
    narrow = Bf16MomentsAdamW([torch.empty(0)])  # torch's constructor refuses views
    narrow.param_groups = [{**narrow.defaults, **group} for group in optimizer.param_groups]
    return narrow
