"""Base models of adapters whose linear layers are quantized as in the training of the adapters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.architecture.base_format import FORMATS, BaseFormat, is_quantized
from nemo_kto.layers.weight_formats import Quantized, dequantize, quantize
from nemo_kto.utils.text import print_error

_IN_LAYER = re.compile(r"layers\.(?:\d+|\{layer\})\.(?P<module>.+)")


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
    """Quantize the linear layers that the training quantizes, one after the other; adapters are left as they are.

    ``folder`` is that of the base model, and ``start`` the beginning of the names of its text model's modules. The experts
    of a mixture are not modules in transformers; such a base stays as it is, which is printed.
    """
    architecture = replace(read_architecture(folder, tensor_parallel=1), base_format=base_format)
    if architecture.experts is not None:
        print_error(f"nemo-kto: {folder} has experts, and is not quantized to {base_format} as in the training")
        return
    names, form = _quantized_modules(architecture), FORMATS[base_format]
    for name, module in [*model.named_modules()]:
        own = _IN_LAYER.search(name.removesuffix(".base_layer")) if name.startswith(start) else None
        if own is not None and own["module"] in names and isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, QuantizedLinear(linear=module, form=form))


def _quantized_modules(architecture: Architecture) -> set[str]:
    """Return the names below a layer of the modules that are quantized."""
    mappings = [each for each in architecture.family.mappings if is_quantized(each.mcore_name, architecture)]
    found = [_IN_LAYER.search(name.removesuffix(".weight")) for each in mappings for name in each.hf_names]
    return {match["module"] for match in found if match is not None}
