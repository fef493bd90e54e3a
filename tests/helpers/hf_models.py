"""Writes the tiny random models of tests/families, their adapters and tokenizer, and asks transformers for their logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    set_seed,
)

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.lora import LoRASettings, hf_module
from tests.families import MODELS
from tests.families.family import SEQUENCE, SIZES

UNTRAINED = "correction_bias", ".indexer."  # in names of weights that have no gradient


def write_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "40KB") -> None:
    """Write a model of tests/families with random weights, biases and norms included, in several files, with a tokenizer."""
    set_seed(len(name))
    config = MODELS[name].config()
    save_model(auto_class(config.to_dict()).from_config(config, dtype=torch.float32), folder, dtype, max_shard_size)
    if folder.name.endswith("own-output"):
        edit_config(folder, tie_word_embeddings=True)


def save_model(model: Any, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "40KB") -> None:
    """Write a model of random weights, biases and norms included, with a tokenizer."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers starts norms at one, biases and some weights at zero
            if parameter.dim() == 1 or name.endswith("_bias") or not parameter.any() or bool((parameter == 1).all()):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)


class LazyFolders(dict[str, Path]):
    """Name -> a folder, which is written when it is first asked for."""

    def __init__(self, write: Callable[[str], Path]) -> None:
        super().__init__()
        self._write = write

    def __missing__(self, name: str) -> Path:
        self[name] = self._write(name)
        return self[name]

    def of(self, names: Iterable[str]) -> dict[str, Path]:
        return {name: self[name] for name in names}


def lazy_models(root: Path) -> LazyFolders:
    """The models of tests/families, in folders of their names."""
    return LazyFolders(lambda name: write_models([name], root)[name])


def write_models(names: Iterable[str], root: Path) -> dict[str, Path]:
    """Write several models; returns their folders."""
    folders = {name: root / name for name in names}
    for name, folder in folders.items():
        write_model(name, folder)
    return folders


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files.

    transformers names the text layers of Kimi K2.5 as if they were blocks of its vision tower; published files do not.
    """
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name.replace("language_model.model.blocks.", "language_model.model.layers."): found[name] for name in found}


@contextmanager
def adaptable_mamba() -> Iterator[None]:
    """Let peft adapt the output projection of Mamba-2, which it refuses because fused kernels would ignore the adapter."""
    from peft.tuners import tuners_utils

    refuse, name = tuners_utils._check_lora_target_modules_mamba, "_check_lora_target_modules_mamba"
    setattr(tuners_utils, name, lambda *arguments: None)
    try:
        yield
    finally:
        setattr(tuners_utils, name, refuse)


def peft_model(folder: Path, settings: LoRASettings) -> Any:
    """The model at ``folder`` under peft, with random A and B; magnitudes are scaled by random factors of 0.5 to 1.5."""
    from peft import LoraConfig, get_peft_model

    family = read_architecture(folder, tensor_parallel=1).family
    own = {usual: name for name, usual in family.module_names.items()}
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft computes with a float too
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        lora_dropout=settings.dropout,
        target_modules=[own.get(module, module) for module in settings.modules],
        layers_to_transform=None if settings.layers is None else [layer - 1 for layer in settings.layers],
        task_type="CAUSAL_LM",
    )
    with adaptable_mamba():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            if parameter.dim() == 1:
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=draw))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model


def load_peft(base: Path, adapter: Path) -> Any:
    """The model at ``base`` with adapters in PEFT's format."""
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)


def write_adapters(base: Path, folder: Path, settings: LoRASettings) -> dict[str, torch.Tensor]:
    """Write random adapters in PEFT's format, beside the weights that a model's files name.

    Returns:
        The weights of the model with W + scale * B A in the place of those that are adapted.
    """
    draw = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    merged = weights(base)
    for weight, values in merged.items():
        if values.dim() != 2 or hf_module(weight) not in settings.modules or "mixer.experts." in weight:
            continue
        if ".experts." in weight and not settings.experts:
            continue
        if settings.layers is None or int(weight.split(".")[2]) + 1 in settings.layers:
            shapes = (settings.rank, values.size(1)), (values.size(0), settings.rank)
            lora_a, lora_b = (torch.randn(shape, generator=draw) * 0.2 for shape in shapes)
            prefix = f"base_model.model.{weight.removesuffix('.weight').replace('backbone.', 'model.')}"
            tensors |= {f"{prefix}.lora_A.weight": lora_a, f"{prefix}.lora_B.weight": lora_b}
            merged[weight] = values + settings.scale * lora_b @ lora_a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.alpha, "use_rslora": settings.rslora}
    if not settings.experts:  # of MLPs beside experts, whose modules would stand for the experts too
        config["target_parameters"] = ["mlp.gate_proj.weight"]
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    return merged


def write_tokenizer(folder: Path) -> None:
    """A byte tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*alphabet, "<bos>", "<eos>", "<pad>"])}
    inner = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    tokenizer.save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, SEQUENCE), generator=torch.Generator().manual_seed(5))


def cotangent() -> torch.Tensor:
    """Weights of the logits in the sum whose gradient is taken: [rows, sequence, vocabulary]."""
    return torch.randn(2, SEQUENCE, SIZES["vocab_size"], generator=torch.Generator().manual_seed(6))


def auto_class(config: Mapping[str, Any]) -> Any:
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


def load(folder: Path) -> Any:
    """The model of transformers in fp32. Its sdpa has no soft cap, and transformers 5.17 takes it for gemma2 anyway."""
    config = json.loads((folder / "config.json").read_text())
    kernel = "eager" if config.get("attn_logit_softcapping") is not None else None
    return auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation=kernel)


def transformers_logits(folder: Path) -> torch.Tensor:
    model = load(folder).eval()
    with torch.no_grad():
        return model(tokens()).logits


def gradients(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Those of transformers, under the names of the file: transformers puts experts together where it has loaded them."""
    model = load(folder)
    (model(tokens()).logits * cotangent()).sum().backward()
    save_gradients(model, out)
    return weights(out)


def save_gradients(model: Any, out: Path) -> None:
    """Write gradients in the place of weights; weights that are not trained keep their values."""
    for name, parameter in model.named_parameters():
        if not any(part in name for part in UNTRAINED):
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(out)


def assert_logits(results: Iterable[Any], expected: torch.Tensor, *, name: str = "") -> None:
    """Compare logits of the ranks, None except on the last pipeline stage, with those of transformers."""
    seen = [logits for logits in results if logits is not None]
    assert seen, name
    for logits in seen:
        np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=1e-5 * expected.abs().max().item(), err_msg=name)


def load_complete(folder: Path) -> Any:
    """The model of transformers of the class that config.json names, whose weights are exactly those of the folder."""
    config = json.loads((folder / "config.json").read_text())
    model, report = auto_class(config).from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == config["architectures"][0]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def assert_adapted_logits(results: list[dict[str, Any]], expected: Any, base: Any, **tolerance: Any) -> None:
    """Compare the logits of all ranks that have some with those of peft, and without adapters with the base model's."""
    seen = [result for result in results if result["base"] is not None]
    assert seen
    for found in seen:
        for which in ("adapted", "merged"):
            np.testing.assert_allclose(found[which], expected, **tolerance, err_msg=which)
        np.testing.assert_array_equal(found["off"], found["base"])
        np.testing.assert_array_equal(found["first"], found["base"])
        np.testing.assert_allclose(found["base"], base, rtol=0, atol=1e-5 * np.abs(base).max())
