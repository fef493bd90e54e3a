"""Logits, gradients, import and export against transformers, for every family at every layout."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_kto.distributed.state import Layout
from tests import families
from tests.helpers import hf_jobs, hf_models
from tests.helpers.hf_models import weights

DENSE = {
    "tp1": (1, Layout()),
    "tp2": (2, Layout(tensor=2)),
    "pp2": (2, Layout(pipeline=2)),
    "tp2-pp2": (4, Layout(tensor=2, pipeline=2)),
    "tp2-sp": (2, Layout(tensor=2, sequence_parallel=True)),
    "tp2-pp2-sp": (4, Layout(tensor=2, pipeline=2, sequence_parallel=True)),
    "tp4": (4, Layout(tensor=4)),
    "tp2-dp2": (4, Layout(tensor=2)),
}
MIXTURES = {
    "one": (1, Layout()),
    "ep2": (2, Layout(expert=2)),
    "tp2": (2, Layout(tensor=2, sequence_parallel=True)),
    "tp2-ep2-whole-experts": (2, Layout(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1)),
    "tp2-whole-experts": (2, Layout(tensor=2, sequence_parallel=True, expert_tensor=1)),
    "pp2-ep2": (4, Layout(pipeline=2, expert=2)),
    "tp2-ep2": (4, Layout(tensor=2, sequence_parallel=True, expert=2)),
    "ep4": (4, Layout(expert=4)),
    "tp2-pp2": (4, Layout(tensor=2, pipeline=2, sequence_parallel=True)),
}
LAYOUTS = {"dense": DENSE, "mixtures": MIXTURES}
MODELS = {"dense": families.DENSE, "mixtures": families.MIXTURES}
# Of gradients, relative to the largest of a weight.
TOLERANCE = {"dense": 2e-5, "mixtures": 5e-5}
# Dense models whose exports transformers loads, and whether their embeddings are tied.
TIED = {"llama": False, "llama-odd-heads": True, "llama-own-output": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> hf_models.LazyFolders:
    return hf_models.lazy_models(tmp_path_factory.mktemp("models"))


def cases(**quick: str) -> pytest.MarkDecorator:
    """A model of each family at one layout, and in the full matrix all models at every layout."""
    one_of_each = {kind: [name for name, model in models.items() if model.quick] for kind, models in MODELS.items()}
    marked = [pytest.param(kind, name, one_of_each[kind], id=f"{kind}-{name}-quick") for kind, name in quick.items()]
    for kind, layouts in LAYOUTS.items():
        marked += [pytest.param(kind, name, MODELS[kind], id=f"{kind}-{name}", marks=pytest.mark.full) for name in layouts]
    return pytest.mark.parametrize(("kind", "layout", "names"), marked)


@cases(dense="tp2", mixtures="tp2-ep2-whole-experts")
def test_logits_weights_and_exports(
    kind: str, layout: str, names: Iterable[str], ranks: Any, folders: Any, tmp_path: Path
) -> None:
    world_size, of_ranks = LAYOUTS[kind][layout]
    results = ranks.run(world_size, hf_jobs.check_models, of_ranks, folders.of(names), tmp_path)
    for name, folder in folders.of(names).items():
        expected = hf_models.transformers_logits(folder)
        hf_models.assert_logits([result[name] for result in results], expected, name=name)
        before, after = weights(folder), weights(tmp_path / name)
        assert before.keys() == after.keys()
        for weight, tensor in before.items():
            assert after[weight].dtype == tensor.dtype
            assert torch.equal(after[weight], tensor), f"{name} {weight}"
        if kind == "mixtures" or name in TIED:
            model = hf_models.load_complete(tmp_path / name)
            assert torch.equal(model.eval()(hf_models.tokens()).logits, expected), name
            assert (model.dtype, model.config.vocab_size) == (torch.float32, 259)
            assert model.config.tie_word_embeddings is TIED.get(name, model.config.tie_word_embeddings)
    if kind == "dense":
        source, copy = (AutoTokenizer.from_pretrained(path) for path in (folders["llama"], tmp_path / "llama"))
        messages = [{"role": "user", "content": "Hi"}]
        assert copy.apply_chat_template(messages, tokenize=False) == source.apply_chat_template(messages, tokenize=False)
        assert copy("Hello").input_ids == source("Hello").input_ids
        files = {file.name for file in (tmp_path / "llama").iterdir()}
        assert {"config.json", "generation_config.json", "chat_template.jinja", "model.safetensors.index.json"} <= files
        assert len([file for file in files if file.startswith("model-")]) > 1
        assert not any(file.startswith("part-") for file in files)


def test_llama4_routes_by_logits_if_sigmoids_are_equal(ranks: Any, tmp_path: Path) -> None:
    """The router is so sure that in fp32 the sigmoid is 1 for several experts."""
    hf_models.write_model("llama4-norms-everywhere", sure := tmp_path / "sure")
    routers = {name: 40 * values for name, values in weights(sure).items() if name.endswith("router.weight")}
    for file in sure.glob("*.safetensors"):
        save_file({name: routers.get(name, values) for name, values in load_file(file).items()}, file, {"format": "pt"})
    (result,) = ranks.run(1, hf_jobs.check_models, Layout(), {"sure": sure}, tmp_path / "out")
    expected = hf_models.transformers_logits(sure)
    hf_models.assert_logits([result["sure"]], expected)


@pytest.mark.parametrize("name", [name for name, model in families.MIXTURES.items() if "index_topk" in model.fields])
def test_an_indexer_changes_nothing_up_to_as_many_tokens_as_it_chooses_keys(name: str, folders: Any) -> None:
    """In transformers; the logits of the next token differ, so that longer sequences must be refused."""
    logits = {}
    for chosen in (hf_models.SEQUENCE - 1, hf_models.SEQUENCE, 10 * hf_models.SEQUENCE):
        model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32, index_topk=chosen).eval()
        logits[chosen] = model(hf_models.tokens()).logits.detach()
    fewer, equal, more = logits.values()
    assert torch.equal(equal, more)
    assert torch.equal(fewer[:, :-1], more[:, :-1])
    assert (fewer[:, -1] - more[:, -1]).abs().max() > 0.01 * more.abs().max()


@cases(dense="tp1", mixtures="one")
def test_gradients_equal_transformers(
    kind: str, layout: str, names: Iterable[str], ranks: Any, folders: Any, tmp_path: Path
) -> None:
    world_size, of_ranks = LAYOUTS[kind][layout]
    paddings = ranks.run(world_size, hf_jobs.check_gradients, of_ranks, folders.of(names), tmp_path)
    for name, folder in folders.of(names).items():
        found, expected = weights(tmp_path / name), hf_models.gradients(folder, tmp_path / "expected")
        shutil.rmtree(tmp_path / "expected")
        assert expected.keys() == found.keys()
        for weight, gradient in expected.items():
            near: dict[str, Any] = {"rtol": 0, "atol": TOLERANCE[kind] * gradient.abs().max().item()}
            np.testing.assert_allclose(found[weight].numpy(), gradient.numpy(), **near, err_msg=f"{name} {weight}")
        assert all(result[name] == 0.0 for result in paddings)  # so padding stays zero
