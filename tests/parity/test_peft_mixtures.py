"""Adapters on experts in PEFT's format: logits of peft, and files that round-trip.

The tensors have the names of single experts, as transformers' files have them. Where transformers keeps all experts of a
layer in one tensor, peft puts the adapters of gate and up projection together: their A under each other, B block-diagonal.
"""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_kto.architecture.lora import HUGGING_FACE_TARGETS, LoRASettings
from nemo_kto.artifacts.adapter_files import read_adapter_settings
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.errors import UserError
from nemo_kto.huggingface.peft import load_adapter
from tests.helpers import hf_jobs, hf_models
from tests.helpers.messages import Message

SETTINGS = {
    "gpt-oss": LoRASettings(rank=2, alpha=4, target_modules=("attention",)),
    # dense MLPs and shared experts; routed experts are one parameter in transformers, which peft does not adapt
    "llama4": LoRASettings(rank=2, alpha=4, target_modules=("all",)),
    "mixtral": LoRASettings(rank=2, alpha=4, target_modules=("all",)),
    "qwen2-moe": LoRASettings(rank=2, alpha=4, target_modules=("q_proj", "mlp")),
    "qwen3-moe": LoRASettings(rank=3, alpha=2, target_modules=("mlp",), layers=(2, 3), rslora=True),
    "qwen3-moe-dense-layers": LoRASettings(rank=2, alpha=4, dropout=0.25, target_modules=("q_proj", "mlp")),
}
LAYOUTS = {
    "one": (1, Layout()),
    "ep2": (2, Layout(expert=2)),
    "tp2-ep2-whole-experts": (2, Layout(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1)),
    "tp2-whole-experts": (2, Layout(tensor=2, sequence_parallel=True, expert_tensor=1)),
    "pp2-ep2": (4, Layout(pipeline=2, expert=2)),
}
QUICK = "tp2-ep2-whole-experts"


def transformers_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(hf_models.tokens()).logits.numpy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hf_models.write_models(SETTINGS, tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random adapters, and the merged models."""
    root = tmp_path_factory.mktemp("adapters")
    for name, settings in SETTINGS.items():
        merged = hf_models.write_adapters(folders[name], root / name, settings)
        (root / f"{name}-merged").mkdir()
        shutil.copy(folders[name] / "config.json", root / f"{name}-merged")
        save_file(merged, root / f"{name}-merged" / "model.safetensors", metadata={"format": "pt"})
    return {name: root / name for name in SETTINGS}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.full] * (name != QUICK)) for name in LAYOUTS],
)
def outcome(
    request: pytest.FixtureRequest, ranks: Any, folders: Any, adapters: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    world_size, layout = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(f"adapted-{request.param}")
    return ranks.run(world_size, hf_jobs.check_adapters, layout, folders, adapters, SETTINGS, out), out


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_equal_peft(outcome: Any, folders: Any, adapters: Any, name: str) -> None:
    results, out = outcome
    expected = hf_models.transformers_logits(adapters[name].with_name(f"{name}-merged")).numpy()
    base = hf_models.transformers_logits(folders[name]).numpy()
    assert np.abs(expected - base).max() > 1, "the adapters must change the logits"
    tolerance = {"rtol": 0, "atol": 3e-5 * np.abs(expected).max()}
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        peft = PeftModel.from_pretrained(model, out / name / "again")
    np.testing.assert_allclose(transformers_logits(peft), expected, **tolerance)
    merged = hf_models.transformers_logits(out / name / "merged").numpy()
    np.testing.assert_allclose(merged, expected, **tolerance)
    hf_models.assert_adapted_logits([result[name] for result in results], expected, base, **tolerance)


@pytest.mark.parametrize("name", SETTINGS)
def test_adapter_files_round_trip(outcome: Any, adapters: Any, name: str) -> None:
    again, settings = outcome[1] / name / "again", SETTINGS[name]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapters[name], again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    found = read_adapter_settings(again)
    assert (found.modules, found.layers, found.rank) == (settings.modules, settings.layers, settings.rank)
    assert found.scale == pytest.approx(settings.scale)


@pytest.fixture(scope="module")
def new_on_one_rank(ranks: Any, folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("new")
    ranks.run(1, hf_jobs.new_adapters, folders, SETTINGS, out)
    return out


@pytest.mark.parametrize("name", SETTINGS)
def test_initial_values_are_equal_at_every_layout(outcome: Any, new_on_one_rank: Path, name: str) -> None:
    """A is uniform within 1 / sqrt(in), drawn from the seed and the name of the expert's weight; B is zero."""
    first = load_file(outcome[1] / name / "first" / "adapter_model.safetensors")
    assert not any(values.any() for tensor, values in first.items() if ".lora_B." in tensor)
    a_of = {tensor: values for tensor, values in first.items() if ".lora_A." in tensor}
    of_experts = {
        "gpt-oss": 0,
        "llama4": 0,
        "mixtral": 4 * 4 * 3,
        "qwen2-moe": 3 * 8 * 3,
        "qwen3-moe": 2 * 8 * 3,
        "qwen3-moe-dense-layers": 1 * 8 * 3,
    }  # layers, experts
    assert sum(".experts." in tensor for tensor in a_of) == of_experts[name]
    assert all(0.7 < values.abs().max() * math.sqrt(values.size(1)) <= 1 for values in a_of.values())
    assert len({tuple(values.flatten()[:8].tolist()) for values in a_of.values()}) == len(a_of), "all experts differ"
    of_one = load_file(new_on_one_rank / name / "adapter_model.safetensors")
    assert of_one.keys() == first.keys()
    assert all(torch.equal(values, of_one[tensor]) for tensor, values in a_of.items())


def dora_logits(layout: Layout, folder: Path, adapter: Path) -> Any:
    """On a rank."""
    state.init_distributed(layout=layout, seed=3)
    model, architecture = hf_jobs.adapted_model(folder, layout, read_adapter_settings(adapter))
    load_adapter([model], architecture, adapter)
    return hf_jobs.logits_of_tokens(model, architecture)


def test_magnitudes_of_a_shared_expert_equal_peft(ranks: Any, folders: Any, tmp_path: Path) -> None:
    """Files of peft for Llama 4, whose routed experts have no adapters, are read and written."""
    config = LoraConfig(r=2, lora_alpha=4, use_dora=True, target_modules=["o_proj", "gate_proj", "up_proj", "down_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folders["llama4"], dtype=torch.float32), config)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            random = torch.rand(parameter.shape, generator=draw)
            parameter.copy_(parameter * (0.5 + random) if parameter.dim() == 1 else (random - 0.5) * 0.4)
    model.save_pretrained(str(tmp_path))
    expected = transformers_logits(model)
    assert np.abs(expected - hf_models.transformers_logits(folders["llama4"]).numpy()).max() > 1
    for found in ranks.run(2, dora_logits, Layout(tensor=2, sequence_parallel=True), folders["llama4"], tmp_path):
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * np.abs(expected).max())


def test_adapters_of_experts_in_one_tensor_are_refused(folders: Any, tmp_path: Path) -> None:
    """Peft makes such adapters where transformers keeps all experts in one tensor: gate and up projection share an A."""
    model = AutoModelForCausalLM.from_pretrained(folders["mixtral"], dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=2, target_modules=["w1", "w2", "w3"])).save_pretrained(str(tmp_path))
    with pytest.raises(UserError) as error:
        read_adapter_settings(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0] == Message(f"{tmp_path}", "adapters", "LoRA", "DoRA", "otherwise")
    assert lines[-1] == Message("train", "adapters", "peft")
    tensor = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    modules = ", ".join(HUGGING_FACE_TARGETS)
    assert Message(f"{modules}", "16", f"{tensor}", "experts") in lines
