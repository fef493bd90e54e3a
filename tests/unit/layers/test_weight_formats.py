"""Formats of quantized weights against their published definitions."""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_kto.layers import weight_formats
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.layers.quantized_weight import QuantizedWeight
from nemo_kto.layers.weight_formats import E2M1, NF4, Quantized, dequantize, nf4_kernel, quantize

CPU = torch.device("cpu")


def matrix(rows: int = 200, columns: int = 256) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.02
    values[3, 64:128] = 0.0
    return values


def test_nf4_has_the_nearest_values_in_blocks_of_a_row() -> None:
    """As bitsandbytes: v / max |v| of 64 values becomes the nearest of 16, and the first of two is in the high bits."""
    values = matrix()
    codes, scales = quantize(values, FORMATS["nf4"])
    blocks = values.double().unflatten(1, (4, 64))
    largest = blocks.abs().amax(-1)
    assert torch.equal(scales.double(), largest)
    code = torch.tensor(NF4, dtype=torch.float64)
    scaled = blocks / largest.clamp(min=1e-38).unsqueeze(-1)
    nearest = (scaled.unsqueeze(-1) - code).abs().argmin(-1).flatten(1)
    assert torch.equal(torch.stack([codes >> 4, codes & 15], -1).flatten(1).long(), nearest)
    expected = (code[nearest].float().unflatten(1, (4, 64)) * scales.unsqueeze(-1)).flatten(1)
    assert torch.equal(dequantize(Quantized(codes, scales), FORMATS["nf4"]), expected)


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    for dtype in (torch.float32, torch.bfloat16):
        values = matrix().to(dtype)
        codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=False)
        ours = quantize(values, FORMATS["nf4"])
        assert torch.equal(ours.codes.flatten(), codes.flatten())
        assert torch.equal(ours.scales.flatten(), state.absmax)
        assert nf4_kernel(CPU, dtype) is not None
        parts = Quantized(ours.codes[3:90, 32:96], ours.scales[3:90, 1:3])
        for each in (ours, parts):  # in dtype by the kernel, in fp64 by the formula
            expected = dequantize(each, FORMATS["nf4"], torch.float64).to(dtype)
            assert torch.equal(dequantize(each, FORMATS["nf4"], dtype), expected)
        assert torch.equal(dequantize(ours, FORMATS["nf4"], dtype), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize(("error", "is_used"), [(0.0, True), (1e-7, False), (None, False)])
def test_a_kernel_is_used_if_its_values_are_those_of_the_formula(
    error: float | None, is_used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = matrix()
    expected = dequantize(stored := quantize(values, FORMATS["nf4"]), FORMATS["nf4"], torch.float64).float()
    calls: list[torch.dtype] = []

    def operator(codes: Tensor, scales: Tensor, block: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert (block, name) == (64, "nf4")
        if error is None:
            raise RuntimeError("no library")
        calls.append(dtype)
        pairs = torch.tensor(NF4)[torch.stack([codes >> 4, codes & 15], dim=-1).long()]
        return ((pairs.view(-1, block) * scales.unsqueeze(-1)).view(shape) * (1 + error)).to(dtype)

    installed = ModuleType("bitsandbytes")
    installed.__spec__ = ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", installed)
    packet = SimpleNamespace(dequantize_4bit=SimpleNamespace(default=operator))
    monkeypatch.setattr(torch.ops, "bitsandbytes", packet, raising=False)
    nf4_kernel.cache_clear()
    try:
        assert (nf4_kernel(CPU, torch.float32) is operator) == is_used
        found = dequantize(stored, FORMATS["nf4"])
    finally:
        nf4_kernel.cache_clear()
    assert torch.equal(found, expected)
    assert len(calls) == 2 * is_used + (error == 1e-7)
    assert ("no library); reinstall it" in caplog.text) == (error is None)


def test_mxfp4_is_that_of_the_files_of_gpt_oss() -> None:
    """Codes and scales are read as its files are; scales are powers of two, and values are the nearest, to 6 at most."""
    values = matrix()
    ours = quantize(values, FORMATS["mxfp4"])
    read = dequantize(ours, FORMATS["mxfp4"])
    blocks = ours.codes.unflatten(1, (-1, 16)).unsqueeze(0)
    assert torch.equal(read, convert_moe_packed_tensors(blocks, ours.scales.unsqueeze(0), dtype=torch.float32)[0].T)
    largest = values.abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True)
    power = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    scaled = torch.where(largest > 0, values.unflatten(1, (-1, 32)) / power, 0.0)
    distance = (scaled.unsqueeze(-1) - torch.tensor(E2M1)).abs().amin(-1)
    found = torch.where(largest > 0, read.unflatten(1, (-1, 32)) / power, 0.0)
    assert torch.equal((scaled - found).abs(), distance)
    halves = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 4.0, 0.0] + [0.0] * 22])
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 4.0, 0.0]  # of two nearest values, the one with an even code
    assert dequantize(quantize(halves, FORMATS["mxfp4"]), FORMATS["mxfp4"])[0, :10].tolist() == even


def test_fp8_has_a_scale_for_128_by_128_values() -> None:
    values = matrix()
    codes, scales = quantize(values, FORMATS["fp8"])
    for rows in (slice(0, 128), slice(128, 200)):
        for block in (0, 1):
            part = values[rows, 128 * block : 128 * block + 128]
            scale = part.abs().max() / 448
            assert (scales[rows, block] == scale).all()
            expected = (part / scale).to(torch.float8_e4m3fn).float() * scale
            read = dequantize(Quantized(codes, scales), FORMATS["fp8"])[rows, 128 * block : 128 * block + 128]
            assert torch.equal(read, expected)


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_those_of_the_plan(form: str) -> None:
    stored = quantize(matrix(), FORMATS[form])
    assert sum(part.nbytes for part in stored) == FORMATS[form].bytes_of((200, 256))


@pytest.mark.parametrize("form", FORMATS)
def test_parts_of_a_matrix_are_quantized_like_the_whole(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(matrix(300), FORMATS[form])
    monkeypatch.setattr(weight_formats, "_VALUES_AT_ONCE", 100 * 256)
    parts = quantize(matrix(300), FORMATS[form])
    assert all(torch.equal(part, expected) for part, expected in zip(parts, whole, strict=True))


@pytest.mark.parametrize("form", FORMATS)
def test_a_matrix_that_is_stored_transposed(form: str) -> None:
    """It is quantized as any other one, without torch's warning, which a chat would show."""
    expected, transposed = quantize(matrix(300), FORMATS[form]), matrix(300).T.contiguous().T
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = quantize(transposed, FORMATS[form])
    finally:
        torch.set_warn_always(False)
    assert all(torch.equal(part, each) for part, each in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", FORMATS)
def test_a_value_that_is_not_finite_stays_visible(form: str) -> None:
    for bad in (float("nan"), float("inf")):
        values = matrix()
        values[5, 7] = bad
        assert not dequantize(quantize(values, FORMATS[form]), FORMATS[form]).sum().isfinite()


def test_a_quantized_weight_is_dequantized_for_each_product_and_never_saved() -> None:
    values, inputs = matrix(64, 256), torch.randn(3, 2, 256, requires_grad=True)
    weight = nn.Parameter(QuantizedWeight.empty_like(values, FORMATS["nf4"]), requires_grad=False)
    for rows in (slice(0, 40), slice(40, 64)):
        weight.data[rows][:, :64].copy_(values[rows, :64])
        weight.data[rows].narrow(1, 64, 192).copy_(values[rows, 64:])
    dense = dequantize(quantize(values, FORMATS["nf4"]), FORMATS["nf4"])
    assert torch.equal(weight.float(), dense)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = nn.functional.linear(inputs, weight)
    assert [type(each) for each in saved] == [QuantizedWeight]
    assert torch.equal(output, inputs @ dense.t())
    output.backward(cotangent := torch.randn_like(output))
    assert torch.allclose(inputs.grad, cotangent @ dense)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must not be changed by aten\.normal_"):
        weight.data.normal_()
    with pytest.raises(ValueError, match="whole blocks of 64, got 32 to 96"):
        weight.data.narrow(1, 32, 64)
