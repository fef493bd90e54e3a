"""Logits, import and export against transformers, for every family at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_kto.distributed.state import Layout
from tests.helpers import hf_jobs, hf_models
from tests.helpers.hf_models import weights

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "tp2-pp2": Layout(tensor=2, pipeline=2),
    "tp2-sp": Layout(tensor=2, sequence_parallel=True),
    "tp2-pp2-sp": Layout(tensor=2, pipeline=2, sequence_parallel=True),
    "tp4": Layout(tensor=4),
    "tp2-dp2": Layout(tensor=2),
}
WORLD = {"tp2-dp2": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hf_models.write_models(hf_models.CONFIGS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {name: hf_models.transformers_logits(folder) for name, folder in folders.items()}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.full] * (name != "tp2")) for name in LAYOUTS],
)
def outcome(
    request: pytest.FixtureRequest, ranks: Any, folders: dict[str, Path], tmp_path_factory: Any
) -> tuple[list[Any], Path]:
    """Results of the ranks of one layout, and the folder of their exports."""
    out = tmp_path_factory.mktemp(f"exports-{request.param}")
    layout = LAYOUTS[request.param]
    results = ranks.run(WORLD.get(request.param, layout.model_ranks), hf_jobs.check_models, layout, folders, out)
    return results, out


@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_logits_equal_transformers(outcome: Any, expected: dict[str, torch.Tensor], name: str) -> None:
    found = [result[name] for result in outcome[0] if result[name] is not None]
    assert found
    for logits in found:
        np.testing.assert_allclose(logits, expected[name].numpy(), rtol=0, atol=1e-5 * expected[name].abs().max().item())


@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_weights_round_trip_bitwise(outcome: Any, folders: dict[str, Path], name: str) -> None:
    before, after = weights(folders[name]), weights(outcome[1] / name)
    assert before.keys() == after.keys()
    for weight, tensor in before.items():
        assert after[weight].dtype == tensor.dtype
        assert torch.equal(after[weight], tensor), weight


@pytest.mark.parametrize("name", ["llama", "llama-odd-heads", "llama-own-output"])
def test_export_loads_in_transformers(outcome: Any, folders: dict[str, Path], expected: Any, name: str) -> None:
    folder = outcome[1] / name
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.config.vocab_size == 259
    assert model.config.tie_word_embeddings is (name == "llama-odd-heads")
    assert torch.equal(model.eval()(hf_models.tokens()).logits, expected[name])
    messages = [{"role": "user", "content": "Hi"}]
    source, copy = (AutoTokenizer.from_pretrained(path) for path in (folders[name], folder))
    assert copy.apply_chat_template(messages, tokenize=False) == source.apply_chat_template(messages, tokenize=False)
    assert copy("Hello").input_ids == source("Hello").input_ids
    files = {file.name for file in folder.iterdir()}
    assert {"config.json", "generation_config.json", "chat_template.jinja", "model.safetensors.index.json"} <= files
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert not any(file.name.startswith("part-") for file in folder.iterdir())


@pytest.fixture(
    scope="module", params=["tp1", *(pytest.param(name, marks=pytest.mark.full) for name in ("tp2-pp2", "tp2-sp", "tp4"))]
)
def gradients(
    request: pytest.FixtureRequest, ranks: Any, folders: dict[str, Path], tmp_path_factory: Any
) -> tuple[list[Any], Path]:
    """The largest gradient of a padded value, and the folder with gradients in the place of weights."""
    out = tmp_path_factory.mktemp(f"gradients-{request.param}")
    layout = LAYOUTS[request.param]
    return ranks.run(layout.model_ranks, hf_jobs.check_gradients, layout, folders, out), out


@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_gradients_equal_transformers(gradients: Any, folders: dict[str, Path], name: str) -> None:
    expected, found = hf_models.transformers_gradients(folders[name]), weights(gradients[1] / name)
    assert expected.keys() == found.keys()
    for weight, gradient in expected.items():
        tolerance = 2e-5 * gradient.abs().max().item()
        np.testing.assert_allclose(found[weight].numpy(), gradient.numpy(), rtol=0, atol=tolerance, err_msg=weight)
    assert all(result[name] == 0.0 for result in gradients[0])  # so padding stays zero
