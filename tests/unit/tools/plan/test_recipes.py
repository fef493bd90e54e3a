"""Files of conf/recipe: each fits its model into the GPUs that it names, for every algorithm; and recipe=auto."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import KTO, Recipe
from nemo_kto.cli.job import Job
from nemo_kto.config.compose import config_folder, our_source
from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.memory.run_plan import ROOM
from nemo_kto.processes.ranks import World
from nemo_kto.tools.plan import plan_command as plan
from tests.helpers.messages import raises
from tests.helpers.published_models import CONFIGS
from tests.unit.conftest import composed
from tests.unit.device.test_kernels import RICH, gpu

# Recipe -> its model, the number of GPUs, and parameters of the model as published.
RECIPES = {
    "qwen3_8b_lora": ("Qwen3-8B", 1, "8.19 B"),
    "qwen3_8b_qlora": ("Qwen3-8B", 1, "8.19 B"),
    "qwen3_8b": ("Qwen3-8B", 8, "8.19 B"),
    "llama3_8b": ("Llama-3.1-8B", 8, "8.03 B"),
    "llama3_70b_lora": ("Llama-3.1-70B", 8, "70.6 B"),
    "llama3_70b_qlora": ("Llama-3.1-70B", 1, "70.6 B"),
    "llama3_70b": ("Llama-3.1-70B", 64, "70.6 B"),
    "gemma3_27b": ("gemma-3-27b-it", 16, "27.0 B"),
    "qwen3_30b_a3b": ("Qwen3-30B-A3B", 16, "30.5 B"),
    "nemotron_3_nano": ("NVIDIA-Nemotron-3-Nano-30B-A3B", 16, "31.6 B"),
    "glm4_5_air_lora": ("GLM-4.5-Air", 16, "107 B"),
    "glm4_5_air": ("GLM-4.5-Air", 64, "107 B"),
    "deepseek_v3_lora": ("DeepSeek-V3", 64, "671 B"),
}
SMALL_GPU = {"qwen3_8b_qlora": 12}  # in GB; the others are for 80


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with models of which there is only config.json."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)


def read_table(text: str) -> dict[str, str]:
    """Label -> text of each line of a report."""
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines()[1:])


def test_every_recipe_is_planned() -> None:
    assert {file.name.removesuffix(".yaml") for file in (config_folder() / "recipe").iterdir()} == {*RECIPES, "auto"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits(name: str, recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reserve of memory that the planner leaves, so that no allocation fails; half of it on a small GPU."""
    (model, gpus, parameters), memory = RECIPES[name], SMALL_GPU.get(name, 80)
    config = composed([f"recipe={name}"], recipe)
    assert config.trainer.num_nodes * config.trainer.devices == gpus
    assert plan.main([recipe.name, model, f"recipe={name}", "--gpus", str(gpus), "--memory", str(memory)]) == 0
    table = read_table(capsys.readouterr().out)
    assert table["verdict"] == "fits"
    assert f", {parameters} parameters, {'LoRA of rank' if 'lora' in name else 'all trained'}" in table["model"]
    assert ("frozen linear layers in nf4" in table["precision"]) == ("qlora" in name)
    needed, available = re.findall(r"([\d.]+) GB", table["total"])[:2]
    assert float(needed) <= (ROOM if memory == 80 else (1 + ROOM) / 2) * float(available)
    assert float(available) == memory


def test_precedence(recipe: Recipe) -> None:
    """A key on the command line, then the recipe, then the machine, in any order."""
    config = composed(["model.optim.lr=3e-6", "recipe=llama3_8b", "hardware=gpu_node"], recipe)
    assert (config.model.optim.lr, config.model.global_batch_size) == (3e-6, 128)
    assert config.model.tensor_model_parallel_size == 2
    assert config.trainer.accelerator == "gpu"


FIXED = "model.pipeline_model_parallel_size=2 model.micro_batch_size=1 model.sequence_parallel=true"


@pytest.mark.parametrize(
    ("command", "rate", "layout"),
    [
        ("kto Llama-3.1-8B --gpus 8", "1e-06", "2 data x 2 tensor x 2 pipeline parallel (4 chunks"),
        ("kto Qwen3-8B --gpus 1 model.peft.peft_scheme=lora", "1e-05", "1 rank"),
        ("dpo Qwen3-30B-A3B --gpus 16 lr=3e-6", None, "experts over 8"),
        ("kto granite-4.0-h-small --gpus 16", "1e-06", "8 data x 1 tensor x 2 pipeline"),  # one group of heads
        # settings that are kept; a batch of 32 is too small for as many data-parallel ranks as there are GPUs
        (f"dpo Llama-3.1-8B --gpus 64 batch=32 {FIXED}", "1e-06", "8 data x 4 tensor x 2 pipeline"),
        ("kto Llama-3.1-8B --gpus 16 hardware=gpu_node", "1e-06", "1 data x 8 tensor x 2 pipeline"),
        ("kto Llama-3.1-8B --gpus 8 model.activations_checkpoint_granularity=full", "1e-06", "full recomputation"),
        (
            "kto Qwen3-8B --gpus 2 model.peft.peft_scheme=lora model.tensor_model_parallel_size=2",
            "1e-05",
            "1 data x 2 tensor",
        ),
    ],
)
def test_auto(command: str, rate: str | None, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that is shown gives the same plan when it is pasted, and has no key that was given."""
    given = command.split()
    assert plan.main([*given, "recipe=auto"]) == 0
    line, _, report = capsys.readouterr().out.partition("\n")
    words = line.removeprefix("recipe=auto: ").partition(" (an estimated ")[0].split()
    assert {word.partition("=")[0] for word in words}.isdisjoint(word.partition("=")[0] for word in given)
    assert [word for word in words if "lr=" in word] == [f"model.optim.lr={rate}"] * (rate is not None)
    assert plan.main([*given, *words]) == 0
    assert capsys.readouterr().out == report
    table = read_table(report)
    assert layout in table["layout"]
    assert table["total"].partition(" (")[0] in line
    assert float(table["total"].split()[0]) <= ROOM * 80
    if not any(word.startswith(("model.", "hardware")) for word in given):
        # the layout that the plan prefers if a reserve of memory is left
        plan.main([*given, "--memory", str(ROOM * 80)])
        assert read_table(capsys.readouterr().out)["use"].split() == [word for word in words if "lr=" not in word]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("kto Llama-3.1-8B --gpus 1 --memory 24", ("recipe", "layout that fits", "1 x H100 80GB, 24.0 GB", "use 8", "lora")),
        ("kto Llama-3.1-8B --gpus 6 model.tensor_model_parallel_size=4", ("model.tensor_model_parallel_size", "6")),
        ("kto Llama-3.1-8B --gpus 8 model.tensor_model_parallel_size=3", ("intermediate_size", "14336", "3", "use 2")),
        # tensor parallelism stays within a machine
        (
            "kto Llama-3.1-8B --gpus 16 model.tensor_model_parallel_size=16",
            ("recipe", "16 x H100", "leave out model.tensor_model_parallel_size=16"),
        ),
        # it would fit, but context parallelism is considered only for long sequences
        (
            "kto Llama-3.1-8B --gpus 8 model.context_parallel_size=8",
            ("recipe", "fits and that `nemo-kto plan` considers", "leave out model.context_parallel_size=8"),
        ),
        ("kto Llama-3.1-8B --gpus 8 recipe=llama3_8b", ("recipe", "once", "recipe=llama3_8b and recipe=auto")),
        ("kto Llama-3.1-8B --gpus 8 lrr=1", ("lrr", "model.optim.lr")),
    ],
)
def test_auto_finds_nothing(command: str, names: tuple[str, ...]) -> None:
    with raises(UserError, *names) as error:
        plan.main([*command.split(), "recipe=auto"])
    assert str(error.value).count("\n") == 1, "one mistake"


def test_auto_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [gpt_kto, {override recipe: auto}, _self_]")
    with raises(UserError, "recipe", "is not a key", "auto"):
        plan.main(["kto", "Llama-3.1-8B", "--gpus", "8", "--config-dir", str(tmp_path), "--config-name", "mine"])


@pytest.mark.parametrize(
    ("name", "sizes", "shown"),
    [
        ("NVIDIA H100 80GB HBM3", (85.0e9, 84.9e9), "80.0"),
        # the layouts for 29.0 GB and 29.6 GB differ
        ("a GPU that is not listed", (29.6e9, 29.1e9), "29.0"),
        ("NVIDIA H100 80GB HBM3 MIG", (29.1e9, 29.6e9), "29.0"),
    ],
)
def test_every_rank_finds_the_same(
    name: str,
    sizes: tuple[float, float],
    shown: str,
    good: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The memory that a driver reports differs between GPUs of a kind; rank 0 prints the layout."""
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    gpu(monkeypatch, **RICH)
    monkeypatch.setattr(device, "device_count", lambda: 1)
    monkeypatch.setattr(device, "device_name", lambda: name)
    words = [*(word for word in good if "accelerator" not in word), "recipe='auto'", "trainer.num_nodes=2"]
    found, said = [], []
    for rank, reported in zip((0, 9), sizes, strict=True):
        monkeypatch.setattr(device, "total_memory_bytes", lambda reported=reported: reported)
        world = World(rank=rank, size=16, local_rank=rank % 8, local_size=8)
        found.append(Job(recipe=KTO, source=our_source(KTO), world=world).settled(words))
        said.append(capsys.readouterr().err)
    assert found[0] == found[1]
    assert "model.micro_batch_tokens=" in said[0]
    assert f"of {shown} GB on each of 16 x {name}" in said[0]
    assert said[1] == ""
