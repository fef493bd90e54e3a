"""AdamW whose two moments are stored in bf16, with the arithmetic of torch's AdamW in fp32.

Transformer Engine has such an optimizer, for GPUs; this one has no other requirement, and the same values on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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
                moments = {name: state_dict["state"][number][name] for name in MOMENTS}
                self.state[parameter].update(
                    {name: moment.to(parameter.device, torch.bfloat16) for name, moment in moments.items()}
                )


def with_bf16_moments(optimizer: torch.optim.Optimizer) -> Bf16MomentsAdamW:
    """Return an optimizer with the parameters and settings of another AdamW, torch's or a fused one, without its state.

    The parameters may be views of other tensors, as those of megatron-core's distributed optimizer.
    """
    narrow = Bf16MomentsAdamW([torch.empty(0)])  # torch's constructor refuses views
    narrow.param_groups = [{**narrow.defaults, **group} for group in optimizer.param_groups]
    return narrow
