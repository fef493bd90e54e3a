"""An AdamW whose state lies where Transformer Engine's fused one has it, for machines without a GPU.

Of its v2.9, transformer_engine/pytorch/optimizers/fused_adam.py, in fp32 and without main weights of its own:

    param_groups[i]["step"]   an integer, absent before the first step     (line 497: ``group["step"] += 1``, or 1)
    state[parameter]          exp_avg and exp_avg_sq, fp32, nothing else   (line 401: ``initialize_state``)
    load_state_dict           a KeyError for any other name                (line 327: ``name_to_dtype_map[state_name]``)

The step goes to a kernel that takes an integer. The arithmetic is that of torch's AdamW.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Takes the arguments that megatron-core gives Transformer Engine's."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, adam_w_mode: bool
    ) -> None:
        assert adam_w_mode
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            assert type(group["step"]) is int, "the kernel takes nothing else"
            with_gradient = [weight for weight in group["params"] if weight.grad is not None]
            for weight in with_gradient:
                if not self.state[weight]:
                    self.state[weight] = {name: torch.zeros_like(weight) for name in MOMENTS}
            adamw(
                with_gradient,
                [weight.grad for weight in with_gradient],
                *([self.state[weight][name] for weight in with_gradient] for name in MOMENTS),
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in with_gradient],
                foreach=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for of_parameter in state_dict["state"].values():
            for name in of_parameter:
                if name not in MOMENTS:
                    raise KeyError(name)
        super().load_state_dict(state_dict)


@contextlib.contextmanager
def used() -> Iterator[None]:
    """Within the block megatron-core takes it for Transformer Engine's."""
    names = {
        mcore_optimizer: {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False},
        distrib_optimizer: {"Adam": FusedAdam, "USING_TE_OPTIMIZER": True, "HAVE_APEX_OR_TE": True},
    }
    before = {module: {name: getattr(module, name) for name in values} for module, values in names.items()}
    for module, values in names.items():
        vars(module).update(values)
    try:
        yield
    finally:
        for module, values in before.items():
            vars(module).update(values)
