"""Dequantization of expert matrices in MXFP4, the format of gpt-oss; training and export use the dtype of the model.

32 consecutive values along the input of a matrix share a scale, a power of two, and each value is one of 16 (OCP
Microscaling Formats specification 1.0, sections 5.3 and 6.3). Instead of a tensor NAME, [experts, in, out], the file has

    NAME_blocks  uint8 [experts, out, in / 32, 16]    two values per byte, the first in its lower four bits
    NAME_scales  uint8 [experts, out, in / 32]        the exponent plus 127; 255 is NaN
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_kto.artifacts.safetensors_files import BLOCKS, SCALES, Shapes

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))  # the highest of the four bits is the sign
_BIAS, _NO_NUMBER = 127, 255


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize blocks [..., out, in / 32, 16] and scales [..., out, in / 32] to fp32 [..., out, in]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor(_VALUES)[codes.long()]
    exponents = scales.to(torch.int32)
    factors = torch.ldexp(torch.ones(scales.shape), exponents - _BIAS).masked_fill_(exponents == _NO_NUMBER, torch.nan)
    return (values * factors.unsqueeze(-1)).flatten(-2)


def dequantized_shapes(shapes: Shapes) -> Shapes:
    """Replace the entries of blocks and scales by those of the tensors they encode, unless the file has these tensors too.

    Other names and shapes are kept.
    """
    found = dict(shapes)
    for name in [name.removesuffix(BLOCKS) for name in shapes if name.endswith(BLOCKS)]:
        match shapes[name + BLOCKS], shapes.get(name + SCALES):
            case (experts, rows, groups, 16), (*of_scales,) if of_scales == [experts, rows, groups] and name not in shapes:
                del found[name + BLOCKS], found[name + SCALES]
                found[name] = (experts, 32 * groups, rows)
    return found
