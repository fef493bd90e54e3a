"""Checkpoints of NeMo-Aligner, Megatron-LM and Megatron-Bridge become the Hugging Face folders that they came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nemo_kto.distributed.state import Layout
from nemo_kto.errors import UserError
from nemo_kto.model_files import tokenizer_files
from nemo_kto.tools.convert.import_command import main
from tests.helpers import hf_models
from tests.helpers import megatron_checkpoints as megatron
from tests.helpers.hf_models import weights
from tests.helpers.messages import raises

TP1, TP2 = Layout(), Layout(tensor=2)
Source = Callable[[str], Path]

EMBEDDING = "model.embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    root = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        if not (root / name).exists():
            hf_models.write_model(name, root / name)
        return root / name

    return get


def tokenizer_of(model: Path, folder: Path) -> Path:
    """The tokenizer of a model in a folder without config.json."""
    folder.mkdir(parents=True)
    for file in model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def assert_same(model: Path, imported: Path, *, padded: int = 0) -> None:
    """Equal weights, but for rows that padded the vocabulary, and equal logits."""
    expected, found = weights(model), weights(imported)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        values = found[name]
        if padded and name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert values.size(0) == tensor.size(0) + padded
            values = values[: tensor.size(0)]
        torch.testing.assert_close(values, tensor, rtol=0, atol=0, msg=name)
    logits = hf_models.transformers_logits(model)
    torch.testing.assert_close(hf_models.transformers_logits(imported)[..., : logits.size(-1)], logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "layout", "settings", "padded"),
    [
        ("llama-all-biases-linear-rope", TP2, {"seq_len_interpolation_factor": 2.5}, 1),
        pytest.param("qwen2", TP1, {"tokenizer": {"library": "sentencepiece", "model": None}}, 0, marks=pytest.mark.full),
    ],
)
def test_a_nemo_archive(
    name: str, layout: Layout, settings: dict[str, Any], padded: int, ranks: Any, source: Source, tmp_path: Path
) -> None:
    model, stored = source(name), tmp_path / "unpacked" / "model_weights"
    ranks.run(layout.tensor, save, model, stored, layout, {"prefix": "model."})
    megatron.write_nemo(model, stored, tmp_path / "model.nemo", mode="w:gz" if padded else "w", **settings)
    tokenizer = tokenizer_of(model, tmp_path / "tokenizer")
    main([f"{tmp_path}/model.nemo", f"{tmp_path}/out", "--tokenizer", f"{tokenizer}"])
    assert_same(model, tmp_path / "out", padded=padded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.nemo", "out", "tokenizer", "unpacked"]


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_nemo_archive_with_weights_in_one_file(zero_centered: bool, source: Source, tmp_path: Path) -> None:
    """Norms of Megatron's kind ``1p`` are stored minus one."""
    model, stored = source("mistral"), tmp_path / "unpacked" / "model_weights.ckpt"
    stored.parent.mkdir()
    torch.save(megatron.state_dict(model, norm_offset=-1 if zero_centered else 0), stored)
    megatron.write_nemo(model, stored, tmp_path / "model.nemo", normalization="layernorm1p" if zero_centered else "rmsnorm")
    tokenizer = tokenizer_of(model, tmp_path / "tokenizer")
    main([f"{tmp_path}/model.nemo", f"{tmp_path}/out", "--tokenizer", f"{tokenizer}"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["torch_dtype"]) == (["LlamaForCausalLM"], "float32")
    if not zero_centered:
        logits = [hf_models.transformers_logits(folder) for folder in (model, tmp_path / "out")]
        torch.testing.assert_close(*logits, rtol=0, atol=0)
    for name, tensor in weights(model).items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], tensor, rtol=0, atol=1e-6 * zero_centered)


def test_an_output_weight_that_the_settings_tie_to_the_embedding(source: Source, tmp_path: Path) -> None:
    model, stored = source("mistral"), tmp_path / "unpacked" / "model_weights.ckpt"
    stored.parent.mkdir()
    tensors, tokenizer = megatron.state_dict(model), tokenizer_of(model, tmp_path / "tokenizer")
    for name, output in {"own": tensors["model.output_layer.weight"], "tied": tensors[EMBEDDING].clone()}.items():
        torch.save({**tensors, "model.output_layer.weight": output}, stored)
        megatron.write_nemo(model, stored, tmp_path / f"{name}.nemo", share_embeddings_and_output_weights=True)
        main([f"{tmp_path}/{name}.nemo", f"{tmp_path}/{name}", "--tokenizer", f"{tokenizer}"])
        found, config = weights(tmp_path / name), json.loads((tmp_path / name / "config.json").read_text())
        assert ("lm_head.weight" in found, config["tie_word_embeddings"]) == ((True, False), (False, True))[name == "tied"]
        if name == "own":
            assert torch.equal(found["lm_head.weight"], output)


def test_the_sentencepiece_model_of_a_nemo_archive(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package, transformers would read the file as one of tiktoken if that is installed."""
    pytest.importorskip("sentencepiece")
    model, stored = source("mistral"), tmp_path / "unpacked" / "model_weights.ckpt"
    stored.parent.mkdir()
    torch.save(megatron.state_dict(model), stored)
    megatron.write_nemo(model, stored, tmp_path / "model.nemo", sentencepiece=megatron.sentencepiece_model())
    with monkeypatch.context() as without:
        without.setattr(tokenizer_files, "find_spec", lambda name: None)
        with raises(UserError, f"{tmp_path}/model.nemo", "sentencepiece", "pip install sentencepiece", "--tokenizer FOLDER"):
            main([f"{tmp_path}/model.nemo", f"{tmp_path}/out"])
    main([f"{tmp_path}/model.nemo", f"{tmp_path}/out"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("a cab").input_ids) == ["<s>", "▁", "a", "▁", "c", "a", "b"]
    assert tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    ("name", "layout", "stacked", "more"),
    [
        ("qwen3", TP1, False, {}),
        pytest.param("llama-tied-llama3-rope", TP2, True, {}, marks=pytest.mark.full),
        ("mistral-window", TP2, True, {"window_size": (6, 0)}),
    ],
)
def test_megatron_lm(
    name: str, layout: Layout, stacked: bool, more: dict[str, Any], ranks: Any, source: Source, tmp_path: Path
) -> None:
    """A training checkpoint: with arguments that hold objects, optimizer state, and a file that names the newest."""
    model, folder = source(name), tmp_path / "run" / "iter_0000010"
    options = {"common": {"args": megatron.megatron_lm_arguments(model, **more), "iteration": 10}, "stacked": stacked}
    ranks.run(layout.tensor, save, model, folder, layout, options | {"engine_names": stacked})
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")
    if name == "llama-tied-llama3-rope":  # other constants than those of Megatron-LM: the original config.json has them
        main([f"{folder.parent}", f"{tmp_path}/out", "--tokenizer", f"{model}"])
        assert_same(model, tmp_path / "out")
    else:
        tokenizer = tokenizer_of(model, tmp_path / "tokenizer")
        main([f"{folder.parent}", f"{tmp_path}/out", "--tokenizer", f"{tokenizer}"])
        assert_same(model, tmp_path / "out", padded=layout.tensor - 1)


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3-moe", TP2), ("mixtral", TP1), pytest.param("mixtral", TP2, marks=pytest.mark.full)]
)
def test_megatron_bridge(name: str, layout: Layout, ranks: Any, source: Source, tmp_path: Path) -> None:
    """The tokenizer is in the checkpoint, and the vocabulary is that of the settings."""
    model, folder = source(name), tmp_path / "iter_0000010"
    ranks.run(layout.tensor, save, model, folder, layout, {})
    megatron.write_bridge_config(model, folder, **megatron.experts_of(model))
    main([f"{folder}", f"{tmp_path}/out"])
    assert_same(model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


OTHERS = ["gemma3", "gpt-oss", "llama4", "olmo2", "phi3-part-of-each-head", "qwen2-moe", "smollm3"]


@pytest.mark.parametrize("name", [OTHERS[0], *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS[1:])])
def test_every_family_with_the_config_of_the_original(name: str, ranks: Any, source: Source, tmp_path: Path) -> None:
    model, folder = source(name), tmp_path / "weights"
    ranks.run(2, save, model, folder, TP2, {"engine_names": name == "gemma3"})
    main([f"{folder}", f"{tmp_path}/out", "--tokenizer", f"{model}"])
    assert_same(model, tmp_path / "out")


def save(model: Path, folder: Path, layout: Layout, options: dict[str, Any]) -> None:
    megatron.save_torch_dist(model, folder, layout, **options)
