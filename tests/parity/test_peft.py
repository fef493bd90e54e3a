"""Adapters in PEFT's format: logits of peft, files that round-trip, and refused settings.

Tensors of experts have the names of single experts, as in transformers' files. Where transformers keeps all experts of a
layer in one tensor, peft puts the adapters of gate and up projection together: their A under each other, B block-diagonal.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from tests import families
from tests.helpers import hf_jobs, hf_models
from tests.helpers.messages import Message, raises
from tests.parity.test_huggingface import LAYOUTS

NAMES_OF_LAYOUTS = {
    "dense": ("tp1", "tp2", "tp4", "pp2", "tp2-pp2", "tp2-pp2-sp"),
    "mixtures": ("one", "ep2", "tp2-ep2-whole-experts", "tp2-whole-experts", "pp2-ep2"),
}
SETTINGS = {
    kind: {name: model.lora for name, model in models.items() if model.lora is not None}
    for kind, models in (("dense", families.DENSE), ("mixtures", families.MIXTURES))
}
QUICK = {
    (kind, layout): tuple(name for name in SETTINGS[kind] if families.MODELS[name].quick_lora)
    for kind, layout in (("dense", "tp2"), ("mixtures", "tp2-ep2-whole-experts"))
}
CASES = [pytest.param((*case, names), id=f"{'-'.join(case)}-quick") for case, names in QUICK.items()]
CASES += [
    pytest.param((kind, name, tuple(SETTINGS[kind])), id=f"{kind}-{name}", marks=pytest.mark.full)
    for kind, layouts in NAMES_OF_LAYOUTS.items()
    for name in layouts
]
Folders = hf_models.LazyFolders


class Outcome(NamedTuple):
    """Of some models of a kind: results of the ranks of one layout, and the folder of what they exported."""

    kind: str
    settings: dict[str, LoRASettings]
    results: list[dict[str, Any]]
    out: Path

    def tensors(self, name: str, which: str) -> dict[str, torch.Tensor]:
        return load_file(self.out / name / which / "adapter_model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def peft_for_mamba() -> Iterator[None]:
    with hf_models.adaptable_mamba():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return hf_models.lazy_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def adapters(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Random adapters: those of dense models as peft wrote them, and of mixtures beside the merged models."""
    root = tmp_path_factory.mktemp("adapters")

    def write(name: str) -> Path:
        if name in SETTINGS["dense"]:
            model = hf_models.peft_model(folders[name], SETTINGS["dense"][name])
            model.save_pretrained(root / name, save_embedding_layers=False)
        else:
            merged = hf_models.write_adapters(folders[name], root / name, SETTINGS["mixtures"][name])
            (root / f"{name}-merged").mkdir()
            shutil.copy(folders[name] / "config.json", root / f"{name}-merged")
            save_file(merged, root / f"{name}-merged" / "model.safetensors", metadata={"format": "pt"})
        return root / name

    return Folders(write)


@pytest.fixture(scope="module", params=CASES)
def outcome(
    request: pytest.FixtureRequest, ranks: Any, folders: Folders, adapters: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    kind, layout, names = request.param
    (world_size, of_ranks), out = LAYOUTS[kind][layout], tmp_path_factory.mktemp("adapted")
    settings = {name: SETTINGS[kind][name] for name in names}
    job = hf_jobs.check_adapters, of_ranks, folders.of(names), adapters.of(names), settings, out
    return Outcome(kind, settings, ranks.run(world_size, *job), out)


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(hf_models.tokens()).logits.numpy()


def peft_logits(folder: Path, adapter: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return logits_of(PeftModel.from_pretrained(model, adapter))


def test_logits_equal_peft(outcome: Outcome, folders: Folders, adapters: Folders) -> None:
    for name in outcome.settings:
        base = hf_models.transformers_logits(folders[name]).numpy()
        again, merged = (outcome.out / name / which for which in ("again", "merged"))
        of_peft = peft_logits(folders[name], again)
        if outcome.kind == "dense":
            expected, least, most = peft_logits(folders[name], adapters[name]), 0.1, 1e-5
            np.testing.assert_array_equal(of_peft, expected)
        else:
            whole = adapters[name].with_name(f"{name}-merged")
            expected, least, most = hf_models.transformers_logits(whole).numpy(), 1, 3e-5
        assert np.abs(expected - base).max() > least, "the adapters must change the logits"
        tolerance = {"rtol": 0, "atol": most * np.abs(expected).max()}
        for found in (of_peft, hf_models.transformers_logits(merged).numpy()):
            np.testing.assert_allclose(found, expected, **tolerance, err_msg=name)
        hf_models.assert_adapted_logits([result[name] for result in outcome.results], expected, base, **tolerance)


def test_adapter_files_round_trip(outcome: Outcome, folders: Folders, adapters: Folders) -> None:
    """Files are written back bitwise, those of peft with equal configurations."""
    for name, wanted in outcome.settings.items():
        again = outcome.out / name / "again"
        before, after = load_file(adapters[name] / "adapter_model.safetensors"), outcome.tensors(name, "again")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
        settings = read_adapter_settings(again)
        assert (settings.rank, settings.modules, settings.layers) == (wanted.rank, wanted.modules, wanted.layers)
        assert settings.experts == bool(families.MODELS[name].adapted_experts)
        assert settings.scale == pytest.approx(wanted.scale)
        if outcome.kind == "dense":
            assert settings == read_adapter_settings(adapters[name])
            assert (settings.alpha, settings.dropout, settings.dora) == (wanted.alpha, wanted.dropout, wanted.dora)
            ours, theirs = (json.loads((each / "adapter_config.json").read_text()) for each in (again, adapters[name]))
            assert ours["base_model_name_or_path"] == theirs["base_model_name_or_path"] == str(folders[name])
            assert all(ours[key] == theirs[key] for key in ours.keys() - {"target_modules"})


def test_initial_values_are_equal_at_every_layout(outcome: Outcome, ranks: Any, folders: Folders, tmp_path: Path) -> None:
    """A is uniform within 1 / sqrt(in), drawn from the seed and the name of the weight; B is zero; a magnitude is a norm."""
    ranks.run(1, hf_jobs.new_adapters, folders.of(outcome.settings), outcome.settings, tmp_path)
    for name, settings in outcome.settings.items():
        first, of_one = outcome.tensors(name, "first"), load_file(tmp_path / name / "adapter_model.safetensors")
        weights = hf_models.weights(folders[name])
        assert any("magnitude" in tensor for tensor in first) == settings.dora
        for tensor, values in first.items():
            bound = values.size(-1) ** -0.5
            if tensor.endswith("lora_magnitude_vector"):
                weight = tensor.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")
                torch.testing.assert_close(values, weights[weight].norm(dim=1), rtol=1e-6, atol=0)
            elif ".lora_B." in tensor or tensor.endswith("lora_embedding_A"):
                assert not values.any()
            elif tensor.endswith("lora_embedding_B"):
                assert values.std().item() == pytest.approx(1, rel=0.15), "normally distributed, as in peft"
            else:
                assert 0.7 * bound < values.abs().max() <= bound
                assert len(values.unique()) > 0.9 * values.numel()
        a_of = {tensor: values for tensor, values in first.items() if ".lora_A." in tensor}
        assert sum(".experts." in tensor for tensor in a_of) == families.MODELS[name].adapted_experts
        assert len({tuple(values.flatten()[:8].tolist()) for values in a_of.values()}) == len(a_of), "all layers differ"
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
        "alpha_pattern": {"q_proj": 16},
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
        Message("alpha_pattern", "q_proj", "16"),
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
    model, architecture = hf_jobs.adapted_model(folder, Layout(), SETTINGS["dense"]["qwen3"])
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
    expected = logits_of(model)
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
