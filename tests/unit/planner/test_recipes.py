"""Files of conf/recipe: each fits its model into the GPUs that it names, for every algorithm; and recipe=auto."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import Recipe
from nemo_kto.cli import plan
from nemo_kto.config.compose import config_folder
from nemo_kto.planner.plan_run import _ROOM
from tests.helpers.published_models import CONFIGS
from tests.unit.conftest import composed

# Recipe -> its model, the number of GPUs, and parameters of the model as published.
RECIPES = {
    "qwen3_8b_lora": ("Qwen3-8B", 1, "8.19 B"),
    "qwen3_8b": ("Qwen3-8B", 8, "8.19 B"),
    "llama3_8b": ("Llama-3.1-8B", 8, "8.03 B"),
    "llama3_70b_lora": ("Llama-3.1-70B", 8, "70.6 B"),
    "llama3_70b": ("Llama-3.1-70B", 64, "70.6 B"),
    "gemma3_27b": ("gemma-3-27b-it", 16, "27.0 B"),
    "qwen3_30b_a3b": ("Qwen3-30B-A3B", 16, "30.5 B"),
    "nemotron_3_nano": ("NVIDIA-Nemotron-3-Nano-30B-A3B", 16, "31.6 B"),
    "glm4_5_air_lora": ("GLM-4.5-Air", 16, "107 B"),
    "glm4_5_air": ("GLM-4.5-Air", 64, "107 B"),
    "deepseek_v3_lora": ("DeepSeek-V3", 64, "671 B"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with models of which there is only config.json."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)


def test_every_recipe_is_planned() -> None:
    assert {file.name.removesuffix(".yaml") for file in (config_folder() / "recipe").iterdir()} == {*RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits(name: str, recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reserve of memory that the planner leaves, so that no allocation fails."""
    model, gpus, parameters = RECIPES[name]
    config = composed([f"recipe={name}"], recipe)
    assert config.trainer.num_nodes * config.trainer.devices == gpus
    status = plan.main([recipe.name, model, f"recipe={name}", "--gpus", str(gpus), "--gpu", "h100"])
    table = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert (status, table["verdict"]) == (0, "fits")
    assert f", {parameters} parameters, {'LoRA of rank 32' if '_lora' in name else 'all trained'}" in table["model"]
    needed, available = re.findall(r"([\d.]+) GB", table["total"])[:2]
    assert float(needed) <= _ROOM * float(available) == 72


def test_precedence(recipe: Recipe) -> None:
    """A key on the command line, then the recipe, then the machine, in any order."""
    config = composed(["model.optim.lr=3e-6", "recipe=llama3_8b", "hardware=gpu_node"], recipe)
    assert (config.model.optim.lr, config.model.global_batch_size) == (3e-6, 128)
    assert config.model.tensor_model_parallel_size == 2
    assert config.trainer.accelerator == "gpu"
