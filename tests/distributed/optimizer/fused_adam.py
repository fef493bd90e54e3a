"""An AdamW with the state layout of Transformer Engine's fused Adam, for machines without a GPU.

Of its v2.9, transformer_engine/pytorch/optimizers/fused_adam.py, without main weights of its own:

    param_groups[i]["step"]   an integer, absent before the first step         (line 497: ``group["step"] += 1``, or 1)
    state[parameter]          exp_avg and exp_avg_sq in their types, no more   (line 401: ``initialize_state``)
    state_dict                all moments in fp32                              (line 424: ``get_unscaled_state``)
    load_state_dict           a KeyError for any other name                    (line 327: ``name_to_dtype_map[state_name]``)

The step goes to a kernel that takes an integer. The arithmetic is that of torch's AdamW.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
_SUBMODULES = ("transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")


class FusedAdam(torch.optim.Optimizer):
    """Takes the arguments that megatron-core gives Transformer Engine's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        capturable: bool = False,  # which megatron-core 0.19 gives
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,  # of main weights of its own
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        assert not use_decoupled_grad
        self.dtypes = dict(zip(MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype), strict=True))
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            assert type(group["step"]) is int, "the kernel requires an int"
            with_gradient = [weight for weight in group["params"] if weight.grad is not None]
            for weight in with_gradient:
                if not self.state[weight]:
                    self.state[weight] = {name: torch.zeros_like(weight, dtype=dtype) for name, dtype in self.dtypes.items()}
            wide = {name: [self.state[weight][name].float() for weight in with_gradient] for name in MOMENTS}
            adamw(
                with_gradient,
                [weight.grad for weight in with_gradient],
                wide[MOMENTS[0]],
                wide[MOMENTS[1]],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in with_gradient],
                foreach=False,
                fused=True,  # the kernel that torch's AdamW uses as well, see ``fuse_torch_adam``
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for name, moments in wide.items():
                for weight, moment in zip(with_gradient, moments, strict=True):
                    self.state[weight][name].copy_(moment)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        wide = {number: {name: kept.float() for name, kept in its.items()} for number, its in state["state"].items()}
        return state | {"state": wide}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for of_parameter in state_dict["state"].values():
            for name in of_parameter:
                if name not in MOMENTS:
                    raise KeyError(name)
        super().load_state_dict(state_dict)  # which gives every state the type of its parameter
        for of_parameter in self.state.values():
            of_parameter.update({name: kept.to(self.dtypes[name]) for name, kept in of_parameter.items()})


@contextlib.contextmanager
def used() -> Iterator[None]:
    """Within the block megatron-core takes it for Transformer Engine's."""
    engine = {name: ModuleType(name) for name in ("transformer_engine", *_SUBMODULES)}
    engine["transformer_engine"].__version__ = "2.9.0"  # type: ignore[attr-defined]
    engine[_SUBMODULES[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, engine),
        mock.patch.multiple(mcore_optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distrib_optimizer, create=True, Adam=FusedAdam, USING_TE_OPTIMIZER=True, HAVE_APEX_OR_TE=True),
    ):
        yield
