"""Settings of adapters in PEFT's format, from the names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.artifacts.adapter_files import read_adapter_settings
from nemo_kto.errors import UserError
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


@pytest.mark.parametrize("mixers", [(DELTA_NET, ATTENTION), ((), ATTENTION), (ATTENTION, ATTENTION), (ATTENTION, ())])
def test_layers_may_differ_by_their_mixers(tmp_path: Path, mixers: tuple[tuple[str, ...], ...]) -> None:
    settings = read_adapter_settings(write(tmp_path, *((*MLP, *names) for names in mixers)))
    assert settings.layers is None
    assert {*settings.modules} == {name.split(".")[1] for name in (*MLP, *mixers[0], *mixers[1])}


@pytest.mark.parametrize("layers", [(MLP, MLP[:2]), ((*MLP, *ATTENTION), (*MLP, ATTENTION[0]))])
def test_other_differences_are_refused(tmp_path: Path, layers: tuple[tuple[str, ...], ...]) -> None:
    with raises(UserError, f"{tmp_path}", "same modules", f"{len(layers)} layers"):
        read_adapter_settings(write(tmp_path, *layers))
