"""Settings of adapters in PEFT's format, from the names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.architecture.families import FAMILIES, MULTIMODAL
from nemo_kto.errors import UserError
from nemo_kto.model_files.adapter_files import beginning_of, read_adapter_settings
from tests.helpers.messages import raises
from tests.helpers.tiny_models import write_safetensors

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION, DELTA_NET = ("self_attn.q_proj", "self_attn.o_proj"), ("linear_attn.in_proj_qkv", "linear_attn.out_proj")


def write(folder: Path, *modules: tuple[str, ...]) -> Path:
    """An adapter of rank 1 with these modules in its layers."""
    names = [f"layers.{layer}.{name}" for layer, of_layer in enumerate(modules) for name in of_layer]
    shapes = {"A": (1, 2), "B": (2, 1)}
    tensors = {f"base_model.model.model.{name}.lora_{end}.weight": shapes[end] for name in names for end in shapes}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    return folder


# adapters of a model with image input, by transformers 5 and 4, of its text model, and as vLLM and AutoModel name them
WRAPPED = ("model.language_model.", "language_model.model.", "model.", "language_model.", "")
PUBLISHED = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
VISION = {"vision_tower.encoder.layers.0.self_attn.q_proj": 8, "visual": 8}


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("beginning", WRAPPED)
def test_names_may_begin_as_in_other_versions(tmp_path: Path, beginning: str, prefix: str) -> None:
    """Also in patterns, of which those without effect are none."""
    module = f"{beginning}layers.1.self_attn.q_proj"
    tensors = {f"{prefix}{module}.lora_{end}.weight": {"A": (2, 4), "B": (4, 2)}[end] for end in "AB"}
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    usual = {"rank_pattern": {module: 2, **VISION}, "alpha_pattern": {module: 4.0, **VISION}, "modules_to_save": []}
    for given in (PUBLISHED, {**PUBLISHED, **usual, "target_modules": [module]}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(given))
        settings = read_adapter_settings(tmp_path)
        assert (settings.rank, settings.alpha, settings.modules, settings.layers) == (2, 4.0, ("q_proj",), (2,))
    for other in WRAPPED:
        for pattern in (f"{other}layers.1.self_attn.q_proj", "q_proj", ".*"):
            (tmp_path / "adapter_config.json").write_text(json.dumps({**PUBLISHED, "alpha_pattern": {pattern: 8}}))
            with raises(UserError, f"{tmp_path}", "alpha_pattern", "not be set", pattern, "8", "merge"):
                read_adapter_settings(tmp_path)


def test_every_family_has_a_known_beginning() -> None:
    for family in (*FAMILIES.values(), *MULTIMODAL):
        name = f"base_model.model.{family.module_prefix}layers.0.self_attn.q_proj.lora_A.weight"
        assert beginning_of(["lm_head.lora_A.weight", name]) == f"base_model.model.{family.module_prefix}"


@pytest.mark.parametrize("mixers", [(DELTA_NET, ATTENTION), ((), ATTENTION), (ATTENTION, ATTENTION), (ATTENTION, ())])
def test_layers_may_differ_by_their_mixers(tmp_path: Path, mixers: tuple[tuple[str, ...], ...]) -> None:
    settings = read_adapter_settings(write(tmp_path, *((*MLP, *names) for names in mixers)))
    assert settings.layers is None
    assert {*settings.modules} == {name.split(".")[1] for name in (*MLP, *mixers[0], *mixers[1])}


@pytest.mark.parametrize("layers", [(MLP, MLP[:2]), ((*MLP, *ATTENTION), (*MLP, ATTENTION[0]))])
def test_other_differences_are_refused(tmp_path: Path, layers: tuple[tuple[str, ...], ...]) -> None:
    with raises(UserError, f"{tmp_path}", "same modules", f"{len(layers)} layers"):
        read_adapter_settings(write(tmp_path, *layers))
