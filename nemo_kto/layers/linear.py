"""Linear layers with the call signature of megatron-core's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_kto.device import device


def with_bias(linear: type) -> type:
    """Return a subclass of a linear layer with a bias; megatron-core's option adds one to attention output and MLP alike."""

    class LinearWithBias(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return LinearWithBias


class ReplicatedLinear(MegatronModule):
    """Linear layer without a bias that every tensor-parallel rank has as a whole.

    Its inputs are the same on all ranks, or with sequence parallelism parts of the sequence. In that case the gradient of
    the weight is a partial sum, which megatron-core sums over the ranks.
    """

    bias: Tensor | None = None

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        where = None if config.use_cpu_initialization else device.current_device()
        weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=where))
        config.init_method(weight)
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return W x, and None in the place of a bias."""
        return F.linear(input_, self.weight), None
