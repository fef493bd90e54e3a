"""MXFP4 matrices: values against the specification and transformers, and shapes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_kto.architecture.config_fields import Quantization
from nemo_kto.huggingface.quantized import stored_weights
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.layers.weight_formats import Quantized, dequantize
from nemo_kto.model_files.safetensors_files import FileTensor, Shapes


def test_every_code_and_scale_of_mxfp4() -> None:
    """Two values in a byte, the first in the lower bits."""
    blocks = torch.arange(0, 256, 17, dtype=torch.uint8)  # the bytes 00, 11, ..., ff
    found = mxfp4(blocks.expand(2, 1, 16), torch.tensor([[127], [120]], dtype=torch.uint8))
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    wanted = torch.tensor([*numbers, *(-number for number in numbers)]).repeat_interleave(2)
    assert torch.equal(found, torch.stack([wanted, wanted / 128]))
    mixed = mxfp4(torch.full((1, 1, 16), 0x72, dtype=torch.uint8), torch.tensor([[129]], dtype=torch.uint8))
    assert mixed.tolist() == [[4.0, 24.0] * 16]
    assert mxfp4(torch.zeros(1, 1, 16, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8)).isnan().all()


def test_values_equal_transformers() -> None:
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8, generator=draw)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, in, out]
    assert torch.equal(mxfp4(blocks, scales).mT, expected)


def test_shapes_of_dequantized_tensors() -> None:
    others = {"a.weight": (3, 4), "b_scales": (1, 2, 3), "c_blocks": (2, 3, 16)}
    packed = {"x_blocks": (5, 12, 2, 16), "x_scales": (5, 12, 2)}
    assert shapes({**packed, **others}) == {"x": (5, 64, 12), **others}
    both = {**packed, "x": (5, 64, 12)}  # neither hides the other, which would then be neither used nor refused
    assert shapes(both) == both


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of blocks [..., out, in / 32, 16] of a file, with scales [..., out, in / 32]."""
    return dequantize(Quantized(blocks.flatten(-2), scales), FORMATS["mxfp4"])


def shapes(found: Shapes) -> Shapes:
    tensors = {name: FileTensor(Path("file"), shape, "U8") for name, shape in found.items()}
    return {name: weight.shape for name, weight in stored_weights(tensors, Quantization(method="mxfp4"))[0].items()}
