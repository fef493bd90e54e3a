"""Models and adapters that inference opens although they cannot be trained, as transformers and peft load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.layers.weight_formats import dequantize, quantize
from nemo_kto.tools.inference.named_models import base_format_of
from nemo_kto.tools.inference.opening import open_model
from nemo_kto.tools.inference.quantized_base import QuantizedLinear

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
_TEXT = {**_SIZES, "vocab_size": 100, "num_key_value_heads": 4, "head_dim": 8}
_IMAGES = {**_SIZES, "image_size": 28, "patch_size": 14}
_WRAPPERS: dict[str, dict[str, Any]] = {  # of a family that can be trained, and of another one
    "gemma3": {"text_config": _TEXT, "vision_config": _IMAGES, "mm_tokens_per_image": 4},
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": {**_IMAGES, "model_type": "clip_vision_model"},
        "image_token_index": 99,
    },
}  # fmt: skip
_ADAPTERS = {
    "biases": peft.LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only"),
    "PiSSA": peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"),
    "a rank for each module": peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], rank_pattern={"q_proj": 1}),
    "LoHa": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "LoKr": peft.LoKrConfig(r=2, target_modules=["q_proj"]),
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


def write_adapters(model: Any, config: peft.PeftConfig, folder: Path) -> Path:
    """Write adapters of random values."""
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    adapted.save_pretrained(str(folder))
    return folder


def write_model(folder: Path, family: str, **fields: Any) -> Path:
    config = transformers.AutoConfig.for_model(family, **fields)
    auto = transformers.AutoModelForImageTextToText if "vision_config" in fields else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return folder


def opened(folder: Path, adapters: Path | None = None, *, class_name: str = "AutoModelForCausalLM") -> dict[str, Any]:
    """The weights of a model as inference opens it."""
    model = open_model(folder, adapters=adapters, class_name=class_name, dtype=torch.float32, remedy="no")
    return dict(model.state_dict())


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", _ADAPTERS)
def test_adapters_are_merged_as_by_peft(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    adapters = write_adapters(load(tiny_llama), _ADAPTERS[kind], tmp_path)
    merged = peft.PeftModel.from_pretrained(load(tiny_llama), str(adapters)).merge_and_unload()
    assert_same(opened(tiny_llama, adapters), merged.state_dict())


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_a_base_that_the_run_quantized(form: str, dora: bool, tmp_path: Path) -> None:
    """As peft with a base whose linear layers have the dequantized values; the output layer is not quantized."""
    sizes = {**_TEXT, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8}
    base = write_model(tmp_path / "model", "llama", **sizes)
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=dora)
    adapters = write_adapters(load(base), config, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.yaml").write_text(f"algorithm: kto\nmodel: {{quantize: {form}}}")
    expected, format_ = load(base), FORMATS[form]
    for name, parameter in expected.named_parameters():
        if ".layers." in name and parameter.dim() == 2:
            parameter.data = dequantize(quantize(parameter.data, format_), format_)
    expected = peft.PeftModel.from_pretrained(expected, str(adapters)).eval()
    how: Any = {"class_name": "AutoModelForCausalLM", "dtype": torch.float32, "remedy": "no"}
    model = open_model(base, adapters=adapters, base_format=base_format_of(adapters), **how).eval()
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert sum(isinstance(each, QuantizedLinear) for each in model.modules()) == 7
    assert base_format_of(base) is None


@pytest.mark.parametrize("family", _WRAPPERS)
def test_adapters_of_the_text_leave_modules_for_images_with_the_same_names(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family, **_WRAPPERS[family])
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    adapters = write_adapters(model, peft.LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "adapters")
    both = load_file(file := adapters / "adapter_model.safetensors")
    save_file({name: value for name, value in both.items() if "vision" not in name}, file)
    found = opened(folder, adapters, class_name="AutoModelForImageTextToText")
    assert [name for name, value in plain.items() if not torch.equal(found[name], value)] == [
        "model.language_model.layers.0.self_attn.q_proj.weight"
    ]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint32])
def test_buffers_of_published_weights_are_ignored(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "gpt_neox", **_SIZES, vocab_size=100)
    weights = load_file(file := folder / "model.safetensors")
    buffer = {"gpt_neox.layers.0.attention.bias": torch.ones(4, 4).to(dtype)}  # pythia, GPT-J
    save_file(weights | buffer, file, metadata={"format": "pt"})
    assert_same(opened(folder), transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
