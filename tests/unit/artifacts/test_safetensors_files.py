"""Headers of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from nemo_kto.artifacts.safetensors_files import tensor_shapes


@pytest.mark.parametrize("magic", [b"\x80\x02", b"\x80\x04", b"\xff\xfe", b"\x1f\x8b"])
def test_a_header_length_that_looks_like_another_format(magic: bytes, tmp_path: Path) -> None:
    """The first eight bytes are the length of the header, any number; the header may be padded with spaces."""
    file, length = tmp_path / "model.safetensors", int.from_bytes(magic, "little")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    file.write_bytes(length.to_bytes(8, "little") + header.ljust(length).encode() + bytes(8))
    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("w").tolist() == [0.0, 0.0]
    assert tensor_shapes(file) == {"w": (2,)}
