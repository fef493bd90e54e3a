"""Adapters in PEFT's format: logits of peft, files that round-trip, and refused settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_kto.architecture.lora import HUGGING_FACE_TARGETS, LoRASettings
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.errors import UserError
from nemo_kto.huggingface.peft import export_adapter, load_adapter, read_adapter_settings
from tests.helpers import hf_jobs, hf_models
from tests.helpers.messages import Message, raises

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tensor=2),
    "tp4": Layout(tensor=4),
    "pp2": Layout(pipeline=2),
    "tp2-pp2": Layout(tensor=2, pipeline=2),
    "tp2-pp2-sp": Layout(tensor=2, pipeline=2, sequence_parallel=True),
}
SETTINGS = {
    "gemma2": LoRASettings(rank=2, alpha=4, target_modules=("all",)),
    "gemma3": LoRASettings(rank=2, alpha=4, target_modules=("q_proj", "mlp"), layers=(2, 3)),
    "llama-odd-heads": LoRASettings(rank=4, alpha=8, target_modules=("all",)),
    "llama-one-kv-head": LoRASettings(
        rank=3, alpha=2, target_modules=("q_proj", "v_proj", "gate_proj"), layers=(1, 4), rslora=True
    ),
    "mistral": LoRASettings(rank=3, alpha=5, target_modules=("embed_tokens", "o_proj")),
    "llama-all-biases-linear-rope": LoRASettings(rank=2, alpha=4, target_modules=("all",), dora=True),
    "llama-attention-bias": LoRASettings(rank=1, alpha=0.5, dropout=0.25, target_modules=("mlp_fc2", "attention_dense")),
    "olmo2": LoRASettings(rank=2, alpha=4, target_modules=("all",)),
    "qwen2": LoRASettings(
        rank=2, alpha=4, target_modules=("q_proj", "o_proj", "up_proj"), layers=(2, 3), rslora=True, dora=True
    ),
    "qwen3": LoRASettings(rank=2, alpha=16, target_modules=("k_proj", "mlp"), layers=(2,)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hf_models.write_models(SETTINGS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random adapters that peft wrote."""
    root = tmp_path_factory.mktemp("adapters")
    for name, settings in SETTINGS.items():
        model = hf_models.peft_model(folders[name], settings)
        model.save_pretrained(root / name, save_embedding_layers=False)
    return {name: root / name for name in SETTINGS}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.full] * (name != "tp2")) for name in LAYOUTS],
)
def outcome(
    request: pytest.FixtureRequest, ranks: Any, folders: Any, adapters: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    layout = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(f"adapted-{request.param}")
    return ranks.run(layout.model_ranks, hf_jobs.check_adapters, layout, folders, adapters, SETTINGS, out), out


def peft_logits(folder: Path, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter).eval()
    with torch.no_grad():
        return model(hf_models.tokens()).logits


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_equal_peft(outcome: Any, folders: Any, adapters: Any, name: str) -> None:
    results, out = outcome
    expected = peft_logits(folders[name], adapters[name]).numpy()
    base = hf_models.transformers_logits(folders[name]).numpy()
    assert np.abs(expected - base).max() > 0.1, "the adapters must change the logits"
    np.testing.assert_array_equal(peft_logits(folders[name], out / name / "again").numpy(), expected)
    merged = hf_models.transformers_logits(out / name / "merged").numpy()
    tolerance = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(merged, expected, **tolerance)
    hf_models.assert_adapted_logits([result[name] for result in results], expected, base, **tolerance)


@pytest.mark.parametrize("name", SETTINGS)
def test_adapter_files_round_trip(outcome: Any, folders: Any, adapters: Any, name: str) -> None:
    """Files of peft are written back bitwise, with equal configurations."""
    again = outcome[1] / name / "again"
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapters[name], again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    settings = read_adapter_settings(again)
    assert settings == read_adapter_settings(adapters[name])
    wanted = SETTINGS[name]
    assert (settings.rank, settings.alpha, settings.dropout) == (wanted.rank, wanted.alpha, wanted.dropout)
    assert (settings.modules, settings.layers, settings.dora) == (wanted.modules, wanted.layers, wanted.dora)
    ours, theirs = (json.loads((folder / "adapter_config.json").read_text()) for folder in (again, adapters[name]))
    assert ours["base_model_name_or_path"] == theirs["base_model_name_or_path"] == str(folders[name])
    for key in ours.keys() - {"target_modules"}:
        assert ours[key] == theirs[key], key


@pytest.fixture(scope="module")
def new_on_one_rank(ranks: Any, folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("new")
    ranks.run(1, hf_jobs.new_adapters, folders, SETTINGS, out)
    return out


@pytest.mark.parametrize("name", SETTINGS)
def test_initial_values_are_equal_at_every_layout(outcome: Any, new_on_one_rank: Path, folders: Any, name: str) -> None:
    """A is uniform within 1 / sqrt(in), drawn from the seed and the name of the weight; B is zero; a magnitude is a norm."""
    first = load_file(outcome[1] / name / "first" / "adapter_model.safetensors")
    weights = hf_models.weights(folders[name])
    assert any("magnitude" in tensor for tensor in first) == SETTINGS[name].dora
    for tensor, values in first.items():
        if tensor.endswith("lora_magnitude_vector"):
            weight = tensor.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")
            torch.testing.assert_close(values, weights[weight].norm(dim=1), rtol=1e-6, atol=0)
            continue
        if ".lora_B." in tensor or tensor.endswith("lora_embedding_A"):
            assert not values.any()
            continue
        if tensor.endswith("lora_embedding_B"):
            assert values.std().item() == pytest.approx(1, rel=0.15), "normally distributed, as in peft"
            continue
        bound = values.size(1) ** -0.5
        assert 0.75 * bound < values.abs().max() <= bound
        assert len(values.unique()) > 0.9 * values.numel()
    a_of = {tensor: values for tensor, values in first.items() if ".lora_A." in tensor}
    assert len({tuple(values.flatten()[:8].tolist()) for values in a_of.values()}) == len(a_of), "all layers differ"
    of_one = load_file(new_on_one_rank / name / "adapter_model.safetensors")
    assert of_one.keys() == first.keys()
    assert all(torch.equal(values, of_one[tensor]) for tensor, values in a_of.items())


def edited(adapter: Path, out: Path, *, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A copy of an adapter with another configuration or other tensors."""
    out.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | changes))
    if tensors is None:
        tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(tensors, out / "adapter_model.safetensors")
    return out


def test_rank_stabilised_scaling(adapters: Any, tmp_path: Path) -> None:
    folder = edited(adapters["llama-odd-heads"], tmp_path / "rs", use_rslora=True)
    settings = read_adapter_settings(folder)
    assert (settings.alpha, settings.rslora, settings.scale) == (8.0, True, 8 / 4**0.5)


def test_magnitudes_require_use_dora(adapters: Any, tmp_path: Path) -> None:
    for name, dora in (("qwen2", True), ("qwen3", False)):
        folder = edited(adapters[name], tmp_path / name, use_dora=not dora)
        with pytest.raises(UserError) as error:
            read_adapter_settings(folder)
        which = "with" if dora else "without"
        assert str(error.value).splitlines()[1:-1] == [
            Message("use_dora", f"{dora}", f"{which}", "lora_magnitude_vector", f"{not dora}")
        ]


def test_layers_by_pattern(adapters: Any, tmp_path: Path) -> None:
    """If peft's target_modules is a regular expression, the modules are found from the tensors."""
    tensors = {
        name: values
        for name, values in load_file(adapters["llama-odd-heads"] / "adapter_model.safetensors").items()
        if ".layers.0." in name and ".q_proj." in name
    }
    folder = edited(adapters["llama-odd-heads"], tmp_path / "regex", tensors=tensors, target_modules=r".*\.0\..*q_proj")
    settings = read_adapter_settings(folder)
    assert (settings.modules, settings.layers) == (("q_proj",), (1,))


def test_all_unsupported_settings_are_in_one_error(adapters: Any, tmp_path: Path) -> None:
    tensors = load_file(adapters["llama-odd-heads"] / "adapter_model.safetensors")
    tensors = {name: values for name, values in tensors.items() if ".layers.0.self_attn.q_proj" not in name}
    tensors["base_model.model.lm_head.weight"] = torch.zeros(2)
    changes = {
        "bias": "all",
        "init_lora_weights": "pissa",
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"q_proj": 8},
        "fan_in_fan_out": True,
        "something_new": 1,
    }
    folder = edited(adapters["llama-odd-heads"], tmp_path / "edited", tensors=tensors, **changes)
    with pytest.raises(ValueError) as error:
        read_adapter_settings(folder)
    assert str(error.value).splitlines() == [
        Message(f"{folder}", "adapters", "LoRA", "DoRA", "otherwise"),
        Message("none", "all"),
        Message("init_lora_weights", "pissa"),
        Message("alpha_pattern", "q_proj", "8"),
        Message("fan_in_fan_out", "True"),
        Message("modules_to_save", "['lm_head']"),
        Message("rank_pattern", "q_proj", "8"),
        Message("something_new", "1"),
        Message(f"{', '.join(HUGGING_FACE_TARGETS)}", "1", "base_model.model.lm_head.weight"),
        Message("4", "adapted"),
        Message("train", "adapters", "peft"),
    ]
    folder = edited(adapters["llama-odd-heads"], tmp_path / "other", peft_type="IA3")
    with raises(ValueError, Message("peft_type", "LORA", "IA3")):
        read_adapter_settings(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as missing:
        read_adapter_settings(tmp_path / "empty")
    assert str(missing.value) == (
        Message(
            f"{tmp_path / 'empty'}", "PEFT's", "adapter_config.json", "adapter_model.safetensors", "peft", "save_pretrained"
        )
    )


def load_only(folder: Path, adapter: Path, settings: LoRASettings | None) -> str:
    """On a rank: load an adapter; returns the error."""
    state.init_distributed(layout=Layout(), seed=3)
    model, architecture = hf_jobs.adapted_model(folder, Layout(), settings)
    return hf_jobs.message_of(lambda: load_adapter([model], architecture, adapter))


def test_an_adapter_of_another_shape_is_refused(ranks: Any, folders: Any, adapters: Any) -> None:
    name = "qwen3"
    settings = LoRASettings(rank=3, alpha=16, target_modules=("k_proj", "up_proj", "down_proj"), layers=(1,))
    (message,) = ranks.run(1, load_only, folders[name], adapters[name], settings)
    head, *problems = message.splitlines()
    assert head == (
        Message("UserError", f"{adapters[name]}", "adapters", "3", "k_proj", "up_proj", "down_proj", "15", "differences")
    )
    prefix = "base_model.model.model.layers"
    assert problems[0] == Message("adapters", "5.33333", "16", "2")
    assert f"  missing: {prefix}.0.self_attn.k_proj.lora_A.weight" in problems
    assert f"  unexpected: {prefix}.1.mlp.gate_proj.lora_B.weight" in problems
    settings = LoRASettings(rank=4, alpha=32, target_modules=("k_proj", "mlp"), layers=(2,))
    (message,) = ranks.run(1, load_only, folders[name], adapters[name], settings)
    assert Message(f"{prefix}.1.mlp.down_proj.lora_A.weight", "4", "48", "2") in message.splitlines()
    assert ranks.run(1, load_only, folders[name], adapters[name], None) == [
        Message("ValueError", "adapters", "one", "models.lora.add_adapters")
    ]


def export_only(folder: Path, out: Path) -> str:
    """On a rank: export new adapters; returns the error."""
    state.init_distributed(layout=Layout(), seed=3)
    model, architecture = hf_jobs.adapted_model(folder, Layout(), SETTINGS["qwen3"])
    return hf_jobs.message_of(lambda: export_adapter([model], architecture, out=out, base_model=folder))


def test_an_export_replaces_only_its_own_adapters(ranks: Any, folders: Any, adapters: Any, tmp_path: Path) -> None:
    assert ranks.run(1, export_only, folders["qwen3"], tmp_path / "out") == [""]
    assert ranks.run(1, export_only, folders["qwen3"], tmp_path / "out") == [""]
    for other in (adapters["qwen3"], folders["qwen3"]):
        before = sorted((file.name, file.stat().st_size) for file in other.iterdir())
        assert ranks.run(1, export_only, folders["qwen3"], other) == [
            Message("UserError", "adapters", "failed", f"{other}", "folder")
        ]
        assert sorted((file.name, file.stat().st_size) for file in other.iterdir()) == before


def test_embedding_weights_written_by_peft_are_refused(folders: Any, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folders["mistral"], dtype=torch.float32), config)
    model.save_pretrained(str(tmp_path))
    with pytest.raises(UserError) as error:
        read_adapter_settings(tmp_path)
    assert str(error.value).splitlines()[1:-1] == [
        Message(
            f"{', '.join(HUGGING_FACE_TARGETS)}",
            "1",
            "base_model.model.model.embed_tokens.base_layer.weight",
            "adapters",
            "save_embedding_layers=False",
        )
    ]
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    assert read_adapter_settings(tmp_path).modules == ("q_proj", "embed_tokens")
