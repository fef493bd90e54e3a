"""Mixture-of-experts models against transformers: logits, gradients, import and export, on one rank or on several."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_kto.distributed.state import Layout
from tests.helpers import hf_jobs, hf_models
from tests.helpers.hf_models import weights

LAYOUTS = {
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


def cases(quick: str) -> pytest.MarkDecorator:
    """Every layout, one of them in the quick matrix."""
    marked = [pytest.param(name, marks=[pytest.mark.full] * (name != quick)) for name in LAYOUTS]
    return pytest.mark.parametrize("case", marked)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hf_models.write_models(hf_models.MIXTURES, tmp_path_factory.mktemp("mixtures"))


@cases("tp2-ep2-whole-experts")
def test_logits_and_weights(case: str, ranks: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    world_size, layout = LAYOUTS[case]
    results = ranks.run(world_size, hf_jobs.check_models, layout, folders, tmp_path)
    for name, folder in folders.items():
        expected = hf_models.transformers_logits(folder)
        found = [result[name] for result in results if result[name] is not None]
        assert found
        for logits in found:
            np.testing.assert_allclose(
                logits, expected.numpy(), rtol=0, atol=1e-5 * expected.abs().max().item(), err_msg=name
            )
        before, after = weights(folder), weights(tmp_path / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[weight], tensor) for weight, tensor in before.items()), name
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert torch.equal(model.eval()(hf_models.tokens()).logits, expected), name


def test_llama4_routes_by_logits_if_sigmoids_are_equal(ranks: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """The router is so sure that in fp32 the sigmoid is 1 for several experts."""
    shutil.copytree(folder := folders["llama4-norms-everywhere"], sure := tmp_path / "sure")
    routers = {name: 40 * values for name, values in weights(folder).items() if name.endswith("router.weight")}
    for file in sure.glob("*.safetensors"):
        save_file({name: routers.get(name, values) for name, values in load_file(file).items()}, file, {"format": "pt"})
    (result,) = ranks.run(1, hf_jobs.check_models, Layout(), {"sure": sure}, tmp_path / "out")
    expected = hf_models.transformers_logits(sure)
    np.testing.assert_allclose(result["sure"], expected.numpy(), rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.fixture(scope="module")
def gradients(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Those of transformers, under the names of the file: transformers puts experts together where it has loaded them."""
    found = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        (model(hf_models.tokens()).logits * hf_models.cotangent()).sum().backward()
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        model.save_pretrained(out := tmp_path_factory.mktemp(name))
        found[name] = weights(out)
    return found


@cases("one")
def test_gradients_equal_transformers(
    case: str, ranks: Any, folders: dict[str, Path], gradients: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    world_size, layout = LAYOUTS[case]
    ranks.run(world_size, hf_jobs.check_gradients, layout, folders, tmp_path)
    for name, expected in gradients.items():
        found = weights(tmp_path / name)
        assert expected.keys() == found.keys()
        for weight, gradient in expected.items():
            tolerance = 5e-5 * gradient.abs().max().item()
            np.testing.assert_allclose(
                found[weight].numpy(), gradient.numpy(), rtol=0, atol=tolerance, err_msg=f"{name} {weight}"
            )
