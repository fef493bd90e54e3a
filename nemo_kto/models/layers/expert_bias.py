"""The bias of what an expert puts out, which megatron-core has only where no ranks share an expert."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor


class BiasedExpertOutput(RowParallelLinear):
    """The down projection of an expert, y = W x + b, where the ranks that share it hold all of b and columns of W.

    What these ranks put out is added up, so that each adds a part of b; the tokens that the expert sees are the same on all
    of them, and so is the gradient of b.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})
        # The output is added up where tokens go back to their ranks, if at all. Without this it would pass a reduction of
        # one rank, which gives a view that no bias can be added to in place, as megatron-core's MLP does.
        self.explicit_expert_comm = True
        bias: Any = self.bias
        bias.sequence_parallel = False  # the expert sees whole tokens, wherever they come from
        # In the norm of the gradient it counts once, on the first of the ranks that share the expert.
        bias.tensor_model_parallel, bias.shared = True, self.tp_group.rank() > 0

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """The output without the bias, and this rank's part of the bias."""
        output, bias = super().forward(input_)
        part: Tensor = _Part.apply(bias, self.tp_group.size())  # type: ignore[no-untyped-call]
        return output, part


class _Part(torch.autograd.Function):
    """b / n, with the gradient of the sum over n ranks."""

    @staticmethod
    def forward(ctx: Any, bias_H: Tensor, ranks: int) -> Tensor:
        return bias_H / ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
