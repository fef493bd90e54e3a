"""Frozen weights that are stored quantized and dequantized for each product.

:class:`QuantizedWeight` has shape and dtype of the dense weight, so that megatron-core's layers and adapters use it as any
other frozen weight: an operation on it first computes the dense values, which are freed with the operation. Under
megatron-core's ``LinearWithFrozenWeight`` the backward pass saves the codes, and dequantizes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LinearWithFrozenWeight, RowParallelLinear
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._pytree import tree_map_only

from nemo_kto.layers.layer_settings import BaseFormat
from nemo_kto.layers.mixer_module import ReplicatedLinear
from nemo_kto.layers.weight_formats import SCALE_TYPES, Quantized, dequantize, quantize

_LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


class QuantizedWeight(Tensor):
    """A matrix [out, in] as codes and scales of a format, with the dtype of its dense values."""

    quantized: Quantized
    form: BaseFormat

    @staticmethod
    def __new__(cls, quantized: Quantized, form: BaseFormat, dtype: torch.dtype) -> QuantizedWeight:
        shape = (len(quantized.codes), quantized.scales.size(1) * form.block[1])
        device = quantized.codes.device
        weight: QuantizedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore
        weight.quantized, weight.form = quantized, form
        return weight

    @classmethod
    def empty_like(cls, weight: Tensor, form: BaseFormat) -> QuantizedWeight:
        """Return a quantized weight of the shape, dtype and device of another one, with arbitrary values."""
        rows, columns = weight.shape
        codes = torch.empty(rows, columns * form.bits // 8, dtype=torch.uint8, device=weight.device)
        scales = torch.zeros(rows, columns // form.block[1], dtype=SCALE_TYPES[form.name], device=weight.device)
        return cls(Quantized(codes, scales), form, weight.dtype)

    def dense(self) -> Tensor:
        """Return the dense values, [out, in], in the dtype of the weight."""
        return dequantize(self.quantized, self.form, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) == 2:  # autograd would keep the dense weight
            return LinearWithFrozenWeight.apply(*args, None, False, None)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten, weight = torch.ops.aten, args[0]
        if func is aten.detach.default:
            return weight._with(weight.quantized)
        if func is aten.slice.Tensor:
            return weight._narrowed(*args[1:])
        if func is aten.copy_.default and isinstance(weight, cls):
            source = args[1].quantized if isinstance(args[1], cls) else quantize(args[1], weight.form)
            for part, values in zip(weight.quantized, source, strict=True):
                part.copy_(values)
            return weight
        if func is aten.zero_.default:
            return weight.copy_(torch.zeros(weight.shape, device=weight.device))
        if func._schema.is_mutable and isinstance(weight, cls):
            raise TypeError(f"a quantized weight must not be changed by {func}; copy other values to it")
        args, kwargs = tree_map_only(cls, lambda each: each.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _with(self, quantized: Quantized) -> QuantizedWeight:
        return QuantizedWeight(quantized, self.form, self.dtype)

    def _narrowed(self, dimension: int, start: int | None, stop: int | None, step: int = 1) -> QuantizedWeight:
        """Return a part of the weight that shares its memory; of the columns, it consists of whole blocks."""
        if dimension == 0:
            return self._with(Quantized(*(part[start:stop:step] for part in self.quantized)))
        (first, last, step), width = slice(start, stop, step).indices(self.size(1)), self.form.block[1]
        if step != 1 or first % width or last % width:
            raise ValueError(f"columns of a quantized weight must be whole blocks of {width}, got {first} to {last}")
        codes, scales = (part.unflatten(1, (self.size(1) // width, -1)) for part in self.quantized)
        blocks = slice(first // width, last // width)
        return self._with(Quantized(codes[:, blocks].flatten(1), scales[:, blocks].flatten(1)))


@contextlib.contextmanager
def quantized_linears(form: BaseFormat, *, only_experts: bool) -> Iterator[None]:
    """Context in which a linear layer loses its dense weight, for an empty quantized one, before the next layer is built.

    This concerns the modules that their parents name ``linear_...``, those of the transformer layers.
    """

    def replace_weight(parent: nn.Module, name: str, module: Any) -> None:
        if not name.startswith("linear_") or not isinstance(module, _LINEAR) or (only_experts and not is_expert(module)):
            return
        weight = nn.Parameter(QuantizedWeight.empty_like(module.weight, form), requires_grad=False)
        for attribute, value in vars(module.weight).items():  # those of megatron-core
            setattr(weight, attribute, value)
        module.weight = weight

    def is_expert(module: Any) -> bool:
        return getattr(module, "is_expert", False)

    handle = register_module_module_registration_hook(replace_weight)
    try:
        yield
    finally:
        handle.remove()
