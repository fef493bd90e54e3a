"""Headers of safetensors files."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_kto.errors import error_of
from nemo_kto.model_files import safetensors_files
from nemo_kto.model_files.safetensors_files import has_own_output, tensor_shapes
from tests.helpers.messages import Message


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


ODD_VALUES: list[Any] = [None, True, -1, 0, 1, 2**63, 2**70, 1.0, math.nan, "F32", "\ud800", [], {}, {"a": 1}, {"a": "b"}]
ODD_VALUES += [[0, 8], [4, 12], [8, 16], [16, 24], [2**33, 2**33], [2, 0, 2**62, 4]]
PLACES = (
    "__metadata__", "__metadata__ format", "__metadata__ \ud800", "a dtype", "a shape", "a data_offsets", "a more",
    "b data_offsets", "empty shape", "empty data_offsets", "b", "\ud800",
)  # fmt: skip


def changed_header(rng: random.Random) -> bytes:
    """A valid header, with another value or another byte at some place."""
    known: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape, offsets in (("a", [2], [0, 8]), ("b", [2, 1], [8, 16]), ("empty", [0], [16, 16])):
        known[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    for place in rng.sample(PLACES, rng.choice([0, 1, 1, 2])):
        *above, name = place.split()
        content = known[above[0]] if above else known
        if isinstance(content, dict):
            content[name] = copy.deepcopy(rng.choice([*ODD_VALUES, rng.randint(-20, 40)]))
    text = json.dumps(known, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        byte = rng.randrange(len(text))
        text = text[:byte] + rng.choice([b"\x80", b" ", b"", b"\0", b'"', b"-", b"1", b"{", b"e5"]) + text[byte + 1 :]
    return text


def test_the_library_reads_each_header_that_is_accepted(tmp_path: Path) -> None:
    """Otherwise a run would end with an error of the library after its start."""
    rng, file, read = random.Random(0), tmp_path / "model.safetensors", Counter[str]()
    for _ in range(3000):
        header = changed_header(rng)
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(rng.choice([16, 16, 16, 24])))
        if (message := error_of(partial(tensor_shapes, file))) is not None:
            read["refused"] += 1
            assert Message(str(file), "must be a", "safetensors file") == message
            assert message.isprintable()
            continue
        read["accepted"] += 1
        with safe_open(file, "pt") as opened:
            assert {name: tuple(opened.get_tensor(name).shape) for name in opened.keys()} == tensor_shapes(file)  # noqa: SIM118
    assert min(read.values()) > 400, read
