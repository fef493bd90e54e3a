"""Adapters on the experts of a mixture in PEFT's format: peft computes what we compute, and what it reads we read again.

The tensors have the names of single experts, as transformers' files have them. Where transformers keeps all experts of a
layer in one tensor, peft puts the adapters of gate and up projection together: their A under each other, B block-diagonal.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_kto.checkpoint.adapter import export_adapter, load_adapter
from nemo_kto.checkpoint.adapter_files import read_adapter_settings
from nemo_kto.checkpoint.huggingface import export, load_weights
from nemo_kto.models.lora import add_adapters, disable_adapters, merge_adapters
from nemo_kto.models.lora_settings import OTHER_NAMES, LoRASettings
from nemo_kto.parallel import state
from nemo_kto.parallel.state import Layout
from tests.parity import hf_jobs, hf_models
from tests.parity.test_huggingface import weights

SETTINGS = {
    "mixtral": LoRASettings(rank=2, alpha=4, target_modules=("all",)),
    "qwen3-moe": LoRASettings(rank=3, alpha=2, target_modules=("mlp",), layers=(2, 3), rslora=True),
    "qwen3-moe-dense-layers": LoRASettings(rank=2, alpha=4, target_modules=("q_proj", "mlp")),
}
LAYOUTS = {
    "one": (1, Layout()),
    "ep2": (2, Layout(expert=2)),
    "tp2-ep2-whole-experts": (2, Layout(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1)),
    "tp2-whole-experts": (2, Layout(tensor=2, sequence_parallel=True, expert_tensor=1)),
    "pp2-ep2": (4, Layout(pipeline=2, expert=2)),
}
QUICK = ("one", "tp2-ep2-whole-experts")
FIRST_VALUES: dict[str, dict[str, torch.Tensor]] = {}
SEED = 5


def check_adapters(layout: Layout, folders: dict[str, Path], adapters: dict[str, Path], out: Path) -> dict[str, Any]:
    """On a rank, for each model: logits in every state it can be in, and its adapters and merged weights written."""
    state.init_distributed(layout=layout, seed=3)
    results: dict[str, Any] = {}
    for name, folder in folders.items():
        model, architecture = hf_jobs.build(folder, layout)
        add_adapters(model, SETTINGS[name], architecture=architecture, seed=SEED)
        load_weights([model], architecture, folder)
        model.eval()
        found = {"first": logits(model, architecture)}
        export_adapter([model], architecture, out=out / name / "first", base_model=folder)
        load_adapter([model], architecture, adapters[name])
        found["adapted"] = logits(model, architecture)
        export_adapter([model], architecture, out=out / name / "again", base_model=folder)
        with disable_adapters([model]):
            found["off"] = logits(model, architecture)
        merge_adapters([model])
        found["merged"] = logits(model, architecture)
        export([model], architecture, source=folder, out=out / name / "merged", max_shard_bytes=10**9)
        results[name] = found
    return results


def logits(model: Any, architecture: Any) -> Any:
    with torch.no_grad():
        result = hf_jobs.logits(model, architecture, hf_models.tokens())
    return None if result is None else result.numpy()


def transformers_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(hf_models.tokens()).logits.numpy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    for name in SETTINGS:
        hf_models.write_model(name, root / name)
    return {name: root / name for name in SETTINGS}


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random adapters beside the weights that a model's files name, and the model with W + scale * B A in their place."""
    root, draw = tmp_path_factory.mktemp("adapters"), torch.Generator().manual_seed(3)
    for name, settings in SETTINGS.items():
        tensors, merged = {}, weights(folders[name])
        for weight, values in merged.items():
            module = OTHER_NAMES.get(weight.split(".")[-2], weight.split(".")[-2])
            if values.dim() < 2 or module not in settings.modules:
                continue
            if settings.layers is None or int(weight.split(".")[2]) + 1 in settings.layers:
                lora_a, lora_b = (
                    torch.randn(shape, generator=draw) * 0.2
                    for shape in ((settings.rank, values.size(1)), (values.size(0), settings.rank))
                )
                prefix = f"base_model.model.{weight.removesuffix('.weight')}"
                tensors |= {f"{prefix}.lora_A.weight": lora_a, f"{prefix}.lora_B.weight": lora_b}
                merged[weight] = values + settings.scale * lora_b @ lora_a
        (folder := root / name).mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.alpha, "use_rslora": settings.rslora}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (root / f"{name}-merged").mkdir()
        shutil.copy(folders[name] / "config.json", root / f"{name}-merged")
        save_file(merged, root / f"{name}-merged" / "model.safetensors", metadata={"format": "pt"})
    return {name: root / name for name in SETTINGS}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in LAYOUTS],
)
def outcome(
    request: pytest.FixtureRequest, ranks: Any, folders: Any, adapters: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    world_size, layout = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(f"adapted-{request.param}")
    return ranks.run(world_size, check_adapters, layout, folders, adapters, out), out


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_peft(outcome: Any, folders: Any, adapters: Any, name: str) -> None:
    results, out = outcome
    expected = hf_models.transformers_logits(adapters[name].with_name(f"{name}-merged")).numpy()
    base = hf_models.transformers_logits(folders[name]).numpy()
    assert np.abs(expected - base).max() > 1, "the adapters must matter"
    tolerance = {"rtol": 0, "atol": 3e-5 * np.abs(expected).max()}
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, out / name / "again")
    np.testing.assert_allclose(transformers_logits(peft), expected, **tolerance)
    merged = hf_models.transformers_logits(out / name / "merged").numpy()
    np.testing.assert_allclose(merged, expected, **tolerance)
    seen = [result[name] for result in results if result[name]["off"] is not None]
    assert seen
    for found in seen:
        for which in ("adapted", "merged"):
            np.testing.assert_allclose(found[which], expected, **tolerance, err_msg=which)
        np.testing.assert_array_equal(found["first"], found["off"])
        np.testing.assert_allclose(found["off"], base, rtol=0, atol=1e-5 * np.abs(base).max())


@pytest.mark.parametrize("name", SETTINGS)
def test_files_come_back(outcome: Any, adapters: Any, name: str) -> None:
    again, settings = outcome[1] / name / "again", SETTINGS[name]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapters[name], again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    found = read_adapter_settings(again)
    assert (found.modules, found.layers, found.rank) == (settings.modules, settings.layers, settings.rank)
    assert found.scale == pytest.approx(settings.scale)


@pytest.mark.parametrize("name", SETTINGS)
def test_first_values_are_the_same_at_every_layout(outcome: Any, name: str) -> None:
    """A is uniform within 1 / sqrt(in), drawn from the seed and the name of the expert's weight; B is zero."""
    first = load_file(outcome[1] / name / "first" / "adapter_model.safetensors")
    assert not any(values.any() for tensor, values in first.items() if ".lora_B." in tensor)
    a_of = {tensor: values for tensor, values in first.items() if ".lora_A." in tensor}
    of_experts = {"mixtral": 4 * 4 * 3, "qwen3-moe": 2 * 8 * 3, "qwen3-moe-dense-layers": 1 * 8 * 3}  # layers, experts
    assert sum(".experts." in tensor for tensor in a_of) == of_experts[name]
    assert all(0.7 < values.abs().max() * math.sqrt(values.size(1)) <= 1 for values in a_of.values())
    assert len({tuple(values.flatten()[:8].tolist()) for values in a_of.values()}) == len(a_of), "no two experts alike"
    name_of_first = FIRST_VALUES.setdefault(name, a_of)
    assert all(torch.equal(values, name_of_first[tensor]) for tensor, values in a_of.items())
