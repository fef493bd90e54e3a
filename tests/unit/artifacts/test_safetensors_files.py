"""Headers of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_kto.artifacts import safetensors_files
from nemo_kto.artifacts.safetensors_files import has_own_output, tensor_shapes


@pytest.mark.parametrize("magic", [b"\x80\x02", b"\x80\x04", b"\xff\xfe", b"\x1f\x8b"])
def test_a_header_length_that_looks_like_another_format(magic: bytes, tmp_path: Path) -> None:
    """The first eight bytes are the length of the header, any number; the header may be padded with spaces."""
    file, length = tmp_path / "model.safetensors", int.from_bytes(magic, "little")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    file.write_bytes(length.to_bytes(8, "little") + header.ljust(length).encode() + bytes(8))
    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("w").tolist() == [0.0, 0.0]
    assert tensor_shapes(file) == {"w": (2,)}


@pytest.mark.parametrize(
    ("output", "own"),
    [
        (torch.arange(12.0).view(4, 3), False),
        (torch.tensor([*range(11), 11.5]).view(4, 3), True),
        (torch.arange(12.0).view(3, 4), True),
        (torch.arange(12.0).view(4, 3).to(torch.bfloat16), True),
        (None, False),
    ],
)
def test_an_output_weight_with_other_values_than_the_embedding(
    output: torch.Tensor | None, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "_COMPARED_BYTES", 10)  # so that the last part has one value
    tensors = {"model.embed_tokens.weight": torch.arange(12.0).view(4, 3), "lm_head.weight": output}
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors")
    assert has_own_output(tmp_path) is own


def test_a_folder_without_weights_has_no_output_weight(tmp_path: Path) -> None:
    assert not has_own_output(tmp_path)
