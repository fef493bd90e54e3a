"""Quantization of weights in the formats of a frozen base, and back.

Codes are uint8, [out, in] with one value in a byte or [out, in / 2] with two; scales are [out, in / columns of a block],
also where a block has several rows. A row, or a part of it that consists of whole blocks, can therefore be read and written
alone, and the values do not depend on the layout of a run.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_kto.layers.layer_settings import FORMATS, BaseFormat

logger = logging.getLogger(__name__)


class Quantized(NamedTuple):
    """Codes and scales of a matrix."""

    codes: Tensor
    scales: Tensor


# The 16 values of NF4, quantiles of the normal distribution (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))  # the highest of the four bits is the sign
_BIAS, _NO_NUMBER = 127, 255  # of e8m0, an exponent in 8 bits
_LARGEST_EXPONENT = 2  # of e2m1
_VALUES_AT_ONCE = 2**19  # of a matrix that is quantized
SCALE_TYPES = {"nf4": torch.float32, "fp8": torch.float32, "mxfp4": torch.uint8}


def quantize(values: Tensor, form: BaseFormat) -> Quantized:
    """Quantize a matrix, [out, in], whose first row begins a block; blocks at its lower end may have fewer rows.

    Its rows are quantized in parts, so that temporary tensors are small beside those of a product with the matrix.
    """
    height = form.block[0]
    rows = max(1, _VALUES_AT_ONCE // (height * values.size(1))) * height
    # contiguous, as torch copies it otherwise with a warning
    parts = [_quantize(part.float().contiguous(), form) for part in values.split(rows)]
    return parts[0] if len(parts) == 1 else Quantized(*map(torch.cat, zip(*parts, strict=True)))


def _quantize(values: Tensor, form: BaseFormat) -> Quantized:
    if form.name == "fp8":
        return _to_fp8(values, form.block)
    blocks, is_nf4 = values.unflatten(1, (-1, form.block[1])), form.name == "nf4"
    codes, scales = (_to_nf4 if is_nf4 else _to_mxfp4)(blocks, blocks.abs().amax(-1))
    first, second = codes.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return Quantized(first << 4 | second if is_nf4 else second << 4 | first, scales)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the values of the e2m1 numbers in bytes, [..., bytes], the first in the low bits: [..., 2 * bytes] in fp32."""
    return F.embedding(packed.int(), _pairs("mxfp4", packed.device)).flatten(-2)


def dequantize(quantized: Quantized, form: BaseFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of matrices, [..., out, in]."""
    codes, scales = quantized
    if form.name == "nf4" and (kernel := nf4_kernel(codes.device, dtype)) is not None:
        shape = (*codes.shape[:-1], 2 * codes.size(-1))
        return kernel(codes.contiguous(), scales.flatten(), form.block[1], form.name, shape, dtype)
    return _dequantize(quantized, form).to(dtype)


@cache
def nf4_kernel(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return bitsandbytes' operator if it is installed and has bitwise the values of the formula; None otherwise."""
    if importlib.util.find_spec("bitsandbytes") is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    form, values = FORMATS["nf4"], (torch.linspace(-1.0, 1.0, 64 * 256, device=device) ** 3).view(64, 256)
    codes, scales = stored = quantize(values, form)
    try:
        importlib.import_module("bitsandbytes")
        kernel: Callable[..., Tensor] = torch.ops.bitsandbytes.dequantize_4bit.default
        found = kernel(codes, scales.flatten(), form.block[1], form.name, values.shape, dtype)
    except Exception as error:  # it may have no library for the device, or fit another release of torch
        logger.warning("bitsandbytes is installed but not used (%s: %s); reinstall it", type(error).__name__, error)
        return None
    return kernel if torch.equal(found, _dequantize(stored, form).to(dtype)) else None


def _dequantize(quantized: Quantized, form: BaseFormat) -> Tensor:
    codes, scales = quantized
    if form.name == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif form.name == "nf4":
        values = F.embedding(codes.int(), _pairs("nf4", codes.device)).flatten(-2)
    else:
        values, scales = unpack_e2m1(codes), _e8m0(scales)
    return values.unflatten(-1, (-1, form.block[1])).mul_(scales.unsqueeze(-1)).flatten(-2)


def _to_nf4(blocks: Tensor, largest: Tensor) -> Quantized:
    """Return the codes of the nearest values, the lower of two, and the maximum of each block, both as bitsandbytes."""
    code = torch.tensor(NF4, device=blocks.device)
    scaled = (blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(-1)).clamp_(-1, 1)
    return Quantized(torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8), largest)


def _to_mxfp4(blocks: Tensor, largest: Tensor) -> Quantized:
    """Return codes and exponents of blocks (OCP Microscaling Formats 1.0, section 6.3); of two nearest values the even."""
    exponents = (torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT + _BIAS).clamp_(0, _NO_NUMBER - 1).to(torch.uint8)
    exponents.masked_fill_(~largest.isfinite(), _NO_NUMBER)
    scaled = blocks / _e8m0(exponents).unsqueeze(-1)
    values = torch.tensor(_POSITIVE, device=blocks.device)
    middles, size = (values[:-1] + values[1:]) / 2, scaled.abs()
    lower, upper = (torch.bucketize(size, middles, out_int32=True, right=right) for right in (False, True))
    codes = torch.where(lower % 2 == 0, lower, upper)
    return Quantized((codes + 8 * torch.signbit(scaled)).to(torch.uint8), exponents)


def _to_fp8(values: Tensor, block: tuple[int, int]) -> Quantized:
    """Return e4m3 codes and scales; the largest value of a block becomes the largest of the type."""
    rows = len(values)
    blocks = F.pad(values, (0, 0, 0, -rows % block[0])).unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)[:rows]
    return Quantized(codes.view(torch.uint8), scales.repeat_interleave(block[0], dim=0)[:rows])


def _e8m0(exponents: Tensor) -> Tensor:
    exponents = exponents.int()
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - _BIAS)
    return powers.masked_fill_(exponents == _NO_NUMBER, torch.nan)


@cache
def _pairs(name: str, device: torch.device) -> Tensor:
    """Return the two values of each byte, [256, 2]; NF4 has the first in the high bits, MXFP4 in the low ones."""
    values, bytes_ = torch.tensor(NF4 if name == "nf4" else E2M1), torch.arange(256)
    halves = (bytes_ >> 4, bytes_ & 15)
    return torch.stack([values[half] for half in (halves if name == "nf4" else halves[::-1])], dim=-1).to(device)
