"""A quantized base under adapters: equal to the last bit to the same model with dequantized weights, at every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed.state import Layout
from tests.helpers import hf_models, quantized_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint

ALL = LoRASettings(rank=2, alpha=4, target_modules=("all",))
DORA = replace(ALL, dora=True)
_WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
_LATENT = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "q_lora_rank": 64, "kv_lora_rank": 64,
    "v_head_dim": 64, "moe_intermediate_size": 64,
}  # fmt: skip
# Name -> family, fields of config.json, and adapters.
MODELS: dict[str, tuple[str, dict[str, Any], LoRASettings]] = {
    "llama": ("llama", _WIDE, ALL),
    "latent attention, experts": ("deepseek_v3", _LATENT, replace(ALL, target_modules=("q_b_proj", "o_proj", "mlp"))),
    "joined experts": ("gpt_oss", {"num_hidden_layers": 2}, replace(ALL, target_modules=("attention",), experts=False)),
}
CASES = [
    ("llama", "nf4"),
    ("llama", "fp8"),
    ("llama", "mxfp4"),
    ("latent attention, experts", "nf4"),
    ("joined experts", "mxfp4"),
]
LAYOUTS: dict[str, tuple[str, str, int, Layout]] = {
    "tp2": ("llama", "nf4", 2, Layout(tensor=2, sequence_parallel=True)),
    "tp2 fp8": ("llama", "fp8", 2, Layout(tensor=2)),
    "tp4": ("llama", "nf4", 4, Layout(tensor=4)),
    "pp2": ("llama", "nf4", 2, Layout(pipeline=2)),
    "ep2": ("latent attention, experts", "nf4", 2, Layout(expert=2)),
    "tp2 of experts": ("joined experts", "mxfp4", 2, Layout(tensor=2, sequence_parallel=True)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> hf_models.LazyFolders:
    base = tmp_path_factory.mktemp("quantized")
    return hf_models.LazyFolders(lambda name: make_checkpoint(base / name, MODELS[name][0], **MODELS[name][1]))


def _same(ours: Path, theirs: Path) -> None:
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys()
    assert [name for name, values in found.items() if not torch.equal(values, expected[name])] == []


@pytest.mark.parametrize(("name", "form"), CASES)
def test_it_equals_the_dequantized_model(
    name: str, form: str, folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    """Weights, logits and gradients of adapters are equal bit for bit, so that all that holds for the latter holds."""
    settings = MODELS[name][2]
    quantized_jobs.write_dequantized(folders[name], tmp_path / "base", form)
    run = quantized_jobs.adapted
    ours = ranks.run(1, run, Layout(), folders[name], form, settings, None, tmp_path / "ours")[0]
    theirs = ranks.run(1, run, Layout(), tmp_path / "base", None, settings, None, tmp_path / "theirs")[0]
    assert ours["quantized"] > 0 == theirs["quantized"]
    for kind in ("logits", "off"):
        assert (ours[kind] == theirs[kind]).all()
    _same(tmp_path / "ours/dense.safetensors", tmp_path / "theirs/dense.safetensors")
    _same(tmp_path / "ours/gradients/adapter_model.safetensors", tmp_path / "theirs/gradients/adapter_model.safetensors")
    gradients = load_file(tmp_path / "ours/gradients/adapter_model.safetensors")
    assert all(
        values.any() for each, values in gradients.items() if each.endswith("lora_B.weight") and ".experts." not in each
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_do_not_depend_on_the_layout(
    layout: str, folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    name, form, world_size, of_ranks = LAYOUTS[layout]
    quantized_jobs.write_dequantized(folders[name], tmp_path / "base", form)
    arguments = (of_ranks, folders[name], form, MODELS[name][2], None, tmp_path / "ours", True)
    found = ranks.run(world_size, quantized_jobs.adapted, *arguments)
    assert all(each["quantized"] for each in found)
    dense, expected = load_file(tmp_path / "ours/dense.safetensors"), hf_models.weights(tmp_path / "base")
    assert dense.keys() == expected.keys()
    assert [each for each, values in dense.items() if not torch.equal(values, expected[each])] == []


@pytest.mark.parametrize("settings", [ALL, DORA], ids=["lora", "dora"])
def test_adapters_equal_those_of_peft(
    settings: LoRASettings, folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    """Logits are those of peft on the dequantized model; adapters are merged into the unquantized one."""
    quantized_jobs.write_dequantized(folders["llama"], tmp_path / "base", "nf4")
    oracle = hf_models.peft_model(tmp_path / "base", settings).eval()
    oracle.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = oracle(hf_models.tokens()).logits.numpy()
    arguments = (folders["llama"], "nf4", settings, tmp_path / "adapter", tmp_path / "ours")
    for number, (world_size, layout) in enumerate([(1, Layout()), (2, Layout(tensor=2))]):
        out = tmp_path / f"ours{number}"
        found = ranks.run(world_size, quantized_jobs.adapted, layout, *arguments[:-1], out)
        assert abs(found[0]["logits"] - expected).max() < 1e-4 < abs(expected).max()
        unquantized = hf_models.load_peft(folders["llama"], tmp_path / "adapter").merge_and_unload().state_dict()
        merged = hf_models.weights(out / "merged")
        for name, values in merged.items():
            assert torch.allclose(values, unquantized[name], atol=1e-5), name
        assert any(not torch.equal(values, hf_models.weights(folders["llama"])[name]) for name, values in merged.items())
        again = hf_models.weights(out / "adapter")
        for name, values in hf_models.weights(tmp_path / "adapter").items():
            assert torch.allclose(again[name], values, atol=1e-5), name
