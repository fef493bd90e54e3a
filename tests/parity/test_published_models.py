"""Small models whose config.json has the fields of published ones, in their words: logits, exports and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import set_seed

from nemo_kto.distributed.state import Layout
from tests.helpers import hf_jobs, hf_models
from tests.helpers.published_configs import counts, published, small, text_model, write
from tests.parity.test_multimodal import store

ONE_GROUP = (  # of heads, which one rank holds
    *("ibm-granite--granite-4.0-h-350m", "ibm-granite--granite-4.0-h-tiny"),
    "tiiuae--Falcon-H1-0.5B-Base",
)
OTHERS = {
    name for name in {published(name)["architectures"][0]: name for name in counts()}.values() if name not in ONE_GROUP
} | {"nvidia--Nemotron-H-56B-Base-8K", "mistralai--Devstral-2-123B-Instruct-2512"}


# fields in forms that no model of tests/families has: names of other versions, lists for each layer, several ropes
QUICK = {
    "Qwen--Qwen3.5-397B-A17B", "deepseek-ai--DeepSeek-V3", "google--gemma-3-4b-it", "moonshotai--Kimi-K2.5",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct", "mistralai--Devstral-2-123B-Instruct-2512",
    "nvidia--Nemotron-H-56B-Base-8K", "openai--gpt-oss-20b",
}  # fmt: skip
TP2 = Layout(tensor=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("world_size", "layout", "names"),
    [
        pytest.param(1, Layout(), ONE_GROUP, id="one"),
        pytest.param(2, TP2, sorted(QUICK), id="tp2-quick"),
        pytest.param(2, TP2, sorted(OTHERS - QUICK), id="tp2", marks=pytest.mark.full),
    ],
)
def test_logits_exports_and_gradients(world_size: int, layout: Layout, names: list[str], ranks: Any, tmp_path: Path) -> None:
    folders, expected, of_text = {name: tmp_path / name for name in names}, {}, dict[str, Path]()
    for name, folder in folders.items():
        set_seed(len(name))
        model = text_model(small(name), "cpu").float()
        hf_models.save_model(model, folder)
        store(folder, hf_models.weights(folder))
        with torch.no_grad():
            expected[name] = model.eval()(hf_models.tokens()).logits
        if not {"vision_config", "mamba_head_dim", "mamba_d_head"} & small(name).keys():  # time_step_min of transformers
            of_text[name] = tmp_path / "expected" / name
            (model(hf_models.tokens()).logits * hf_models.cotangent()).sum().backward()
            hf_models.save_gradients(model, of_text[name])
        write(small(name), folder)
    results = ranks.run(world_size, hf_jobs.check_models, layout, folders, tmp_path / "out")
    for name, logits in expected.items():
        hf_models.assert_logits([result[name] for result in results], logits, name=name)
        before, after = hf_models.weights(folders[name]), hf_models.weights(tmp_path / "out" / name)
        assert before.keys() == after.keys(), name
        assert all(torch.equal(after[weight], tensor) for weight, tensor in before.items()), name
        exported = json.loads((tmp_path / "out" / name / "config.json").read_text())
        assert exported["architectures"] == published(name)["architectures"]
    gradients = {name: folders[name] for name in of_text}
    ranks.run(world_size, hf_jobs.check_gradients, layout, gradients, tmp_path / "gradients")
    for name, folder in of_text.items():
        found, wanted = hf_models.weights(tmp_path / "gradients" / name), hf_models.weights(folder)
        assert found.keys() == wanted.keys(), name
        for weight, gradient in wanted.items():
            near: dict[str, Any] = {"rtol": 0, "atol": 5e-5 * gradient.abs().max().item(), "err_msg": f"{name} {weight}"}
            np.testing.assert_allclose(found[weight].numpy(), gradient.numpy(), **near)
