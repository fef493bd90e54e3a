"""gpt-oss with MXFP4 experts as published, against transformers, on one rank and on several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from nemo_kto.distributed.state import Layout
from tests.helpers import hf_jobs, hf_models
from tests.helpers.hf_models import weights

LAYOUTS = {
    "one": (1, Layout()),
    "ep2": (2, Layout(expert=2)),
    "tp2-ep2": (4, Layout(tensor=2, sequence_parallel=True, expert=2)),
}
NAME = "gpt-oss-mxfp4"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks and scales of a matrix are in two files; all other tensors are in bf16."""
    folder: Path = tmp_path_factory.mktemp(NAME)
    hf_models.write_model(NAME, folder, dtype=torch.bfloat16, max_shard_size="1GB")
    draw = torch.Generator().manual_seed(7)
    files: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    for name, values in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            files[0][name] = values
            continue
        experts, width, rows = values.shape
        blocks = (experts, rows, width // 32, 16)
        files[0][f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=draw)
        files[1][f"{name}_scales"] = torch.randint(119, 124, blocks[:3], dtype=torch.uint8, generator=draw)
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    hf_models.edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return folder


@pytest.mark.parametrize("case", ["one", "ep2", pytest.param("tp2-ep2", marks=pytest.mark.full)])
def test_weights_equal_the_dequantized_model_of_transformers(case: str, ranks: Any, folder: Path, tmp_path: Path) -> None:
    world_size, layout = LAYOUTS[case]
    results = ranks.run(world_size, hf_jobs.check_models, layout, {NAME: folder}, tmp_path)
    settings = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **settings).eval()
    with torch.no_grad():
        expected = model(hf_models.tokens()).logits
    hf_models.assert_logits([result[NAME] for result in results], expected)
    assert "quantization_config" not in json.loads((tmp_path / NAME / "config.json").read_text())
    again = hf_models.load_complete(tmp_path / NAME)
    for name, values in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], values), name


def test_weights_are_read_in_bf16_bitwise(ranks: Any, folder: Path, tmp_path: Path) -> None:
    assert ranks.run(1, hf_jobs.convert_type, Layout(), folder, tmp_path / "out") == ["torch.bfloat16"]
    settings = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    expected = AutoModelForCausalLM.from_pretrained(folder, **settings).state_dict()
    found = weights(tmp_path / "out")
    assert all(torch.equal(found[name], values.to(torch.bfloat16)) for name, values in expected.items())
