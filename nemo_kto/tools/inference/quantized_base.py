"""Base models of adapters whose linear layers are quantized as in the training of the adapters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.base_format import is_quantized
from nemo_kto.layers.layer_settings import FORMATS, BaseFormat
from nemo_kto.layers.weight_formats import Quantized, dequantize, quantize

_IN_LAYER = re.compile(r"layers\.(?:\d+|\{layer\})\.(?P<module>.+)")
_JOINED_DIM = 3  # of [experts, out, in]


class QuantizedLinear(nn.Module):
    """A linear layer that keeps codes and scales, and computes its dense weight for each product."""

    def __init__(self, *, linear: nn.Linear, form: BaseFormat) -> None:
        """Quantize the weight of ``linear``, whose bias is kept."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.codes: Tensor
        self.scales: Tensor
        for name, part in quantize(linear.weight.detach(), form)._asdict().items():
            self.register_buffer(name, part, persistent=False)
        self._form, self._dtype = form, linear.weight.dtype

    @property
    def weight(self) -> Tensor:
        """The dense weight, [out, in], which peft reads for DoRA."""
        return dequantize(Quantized(self.codes, self.scales), self._form, self._dtype)

    def forward(self, input_BSI: Tensor) -> Tensor:
        return F.linear(input_BSI, self.weight, self.bias)


@torch.no_grad()
def quantize_base(model: nn.Module, folder: Path, base_format: str, *, start: str) -> None:
    """Quantize the weights that the training quantizes, one after the other; adapters are left as they are.

    ``folder`` is that of the base model, and ``start`` the beginning of the names of its text model's modules. Matrices that
    transformers joins, such as the routed experts of a layer, get the values of the format and stay dense.
    """
    architecture = replace(read_architecture(folder, tensor_parallel=1), base_format=base_format)
    mappings = [each for each in architecture.family.mappings if is_quantized(each.mcore_name, architecture)]
    modules, form = {_in_layer(name) for each in mappings for name in each.hf_names}, FORMATS[base_format]
    for name, module in [*model.named_modules()]:
        if name.startswith(start) and isinstance(module, nn.Linear) and _in_layer(name) in modules:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, QuantizedLinear(linear=module, form=form))
        elif name.startswith(start) and (number := architecture.family.joined_linear.get(_in_layer(name) or "")):
            for matrix in module.weight.chunk(number):
                _round(matrix, form)
    joined = [each for each in (*mappings, *architecture.family.joined) if each.joins_experts]
    transposed = {_in_layer(name) for each in joined if each.transposed for name in each.hf_names}
    for name, parameter in model.named_parameters():
        if name.startswith(start) and ".experts." in name and parameter.dim() == _JOINED_DIM:
            for matrix in parameter.mT if _in_layer(name) in transposed else parameter:
                _round(matrix, form)


def _round(matrix: Tensor, form: BaseFormat) -> None:
    matrix.copy_(dequantize(quantize(matrix, form), form, matrix.dtype))


def _in_layer(name: str) -> str | None:
    """Return the name of a module or weight below its layer; None if it is in none."""
    found = _IN_LAYER.search(name.replace(".base_layer", "").removesuffix(".weight"))
    return None if found is None else found["module"]
