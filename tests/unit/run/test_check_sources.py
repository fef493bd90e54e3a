"""The weights of model, reference and adapters are compared with the architecture before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_kto.architecture.families import FAMILIES
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.errors import UserError
from nemo_kto.run.policy import check_sources
from tests.families import DENSE, MIXTURES
from tests.helpers import hf_models
from tests.helpers.messages import raises
from tests.unit.run.test_build_rows import resolved

MODEL, REFERENCE = "pretrained_checkpoint.restore_from_path", "model.reference.restore_from_path"
ADAPTER = "model.peft.restore_from_path"
ONE_OF_EACH = {model.model_type: name for name, model in (DENSE | MIXTURES).items()}


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Other tensors in the first file that may hold them; None removes one."""
    for name, tensor in changes.items():
        for file in sorted(folder.glob("*.safetensors")):
            tensors = load_file(file)
            if name in tensors or tensor is not None:
                kept = {key: value for key, value in {**tensors, name: tensor}.items() if value is not None}
                save_file(kept, file, metadata={"format": "pt"})
                break


def run_of(**folders: Path) -> ResolvedRun:
    keys = {"model": MODEL, "reference": REFERENCE, "adapter": ADAPTER}
    words = [f"{keys[name]}={folder}" for name, folder in folders.items()]
    return resolved(*words, *(["model.peft.peft_scheme=lora"] if "adapter" in folders else []))


@pytest.mark.parametrize("kind", [*sorted(ONE_OF_EACH.values()), "phi3-part-of-each-head"])
def test_weights_that_differ_are_listed(kind: str, tmp_path: Path) -> None:
    hf_models.write_model(kind, tmp_path, max_shard_size="1GB")
    check_sources(run_of(model=tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    missing = next(name for name in sorted(tensors) if name.endswith(("o_proj.weight", "out_proj.weight", ".dense.weight")))
    norm = next(name for name in tensors if "norm" in name and ".layers." not in name)
    tensors[norm] = torch.zeros(3)
    tensors["language_model.x"] = tensors.pop(missing)
    save_file(tensors, file, metadata={"format": "pt"})
    with raises(
        UserError,
        *(f"{tmp_path}", "3", f"missing: {missing}", "unexpected: language_model.x"),
        *(norm, "[3]", "save_pretrained"),
    ):
        check_sources(run_of(model=tmp_path))


def test_there_is_a_model_of_every_family() -> None:
    """The table of models above has one of each family of the package."""
    assert set(ONE_OF_EACH) == {family.name for family in FAMILIES.values()}


def test_names_with_another_prefix_are_listed_with_those_that_are_missing(tmp_path: Path) -> None:
    """A text model of Gemma 3 that was saved from the class with images has a prefix before each name."""
    hf_models.write_model("gemma3", tmp_path, max_shard_size="1GB")
    tensors = {f"language_model.{name}": each for name, each in hf_models.weights(tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = ["missing: model.layers.0.post_attention_layernorm.weight", "unexpected: language_model.model."]
    with raises(UserError, str(tmp_path), f"{2 * len(tensors)} differences", *expected, f"{len(tensors) - 8} more"):
        check_sources(run_of(model=tmp_path))


def test_reference_and_adapters_are_compared_too(tmp_path: Path) -> None:
    model, reference, adapter = (tmp_path / name for name in ("model", "reference", "adapter"))
    for folder in (model, reference):
        hf_models.write_model("qwen2", folder)  # several files and an index
    settings = LoRASettings(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))
    hf_models.write_adapters(model, adapter, settings)
    check_sources(run_of(model=model, reference=reference, adapter=adapter))
    rewrite(reference, extra=torch.zeros(1))
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    rewrite(adapter, **{lora: torch.zeros(5, 2)})
    with raises(UserError, str(reference), "unexpected: extra", str(adapter), lora, "[5, 2]"):
        check_sources(run_of(model=model, reference=reference, adapter=adapter))


def test_a_reference_whose_output_is_not_tied_fits_no_tied_policy(tmp_path: Path) -> None:
    own, tied = tmp_path / "own-output", tmp_path / "tied"
    hf_models.write_model("llama", own)
    hf_models.edit_config(own, tie_word_embeddings=True)
    hf_models.write_model("llama", tied)
    check_sources(run_of(model=own, reference=tied))  # both have the output weight, which one config.json denies
    rewrite(tied, **{"lm_head.weight": None})
    hf_models.edit_config(tied, tie_word_embeddings=True)
    with raises(UserError, "the reference", str(own), "tied", "False", "True"):
        check_sources(run_of(model=tied, reference=own))
