"""What a plan says of a rank without building it, compared with the model that is built there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.models.lora_settings import LoRASettings
from tests.distributed.ranks import RankPool
from tests.tiny import make_checkpoint

# What a rank holds: its stage, and name -> shape and whether it is trained.
Built = tuple[int, dict[str, tuple[tuple[int, ...], bool]]]
ADAPTERS = LoRASettings(rank=4, alpha=4, target_modules=("all",), layers=(1, 3))


def built(model: Path, tensor: int, pipeline: int, adapters: LoRASettings | None, expert: int) -> Built:
    """The parameters of this rank of a model that is really built."""
    import torch
    from megatron.core import parallel_state

    from nemo_kto.models.architecture import read_architecture
    from nemo_kto.models.gpt import build_gpt
    from nemo_kto.models.lora import add_adapters
    from nemo_kto.parallel import state

    state.init_distributed(layout=state.Layout(tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=1), seed=1)
    architecture = read_architecture(model, tensor_parallel=tensor, expert_tensor_parallel=1)
    gpt = build_gpt(
        architecture,
        params_dtype=torch.float32,
        pipeline_parallel=pipeline,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        expert_parallel=expert,
    )
    if adapters is not None:
        add_adapters(gpt, adapters, architecture=architecture, seed=1)
    of_stage, stage = architecture.num_layers // pipeline, state.pipeline_stage()
    held = {}
    for name, parameter in gpt.named_parameters():
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{int(number) + stage * of_stage}.{rest}"
        held[name] = tuple(parameter.shape), parameter.requires_grad
    return stage, held


def planned(
    model: Path, tensor: int, pipeline: int, stage: int, adapters: LoRASettings | None, expert: int
) -> Mapping[str, Any]:
    from nemo_kto.models.architecture import read_architecture
    from nemo_kto.models.parameters import rank_parameters

    architecture = read_architecture(model, tensor_parallel=tensor, expert_tensor_parallel=1)
    degrees = {"pipeline_parallel": pipeline, "expert_parallel": expert}
    found = rank_parameters(architecture, **degrees, stage=stage, adapters=adapters)
    return {each.name: (each.shape, each.trained) for each in found}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A vocabulary and heads that need padding; tied and untied; biases, and norms on heads."""
    folder = tmp_path_factory.mktemp("planned")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    return {
        "llama": make_checkpoint(folder / "llama", "llama", **heads, attention_bias=True, mlp_bias=True),
        "qwen2": make_checkpoint(folder / "qwen2", "qwen2", **heads),
        "qwen3": make_checkpoint(folder / "qwen3", "qwen3", **heads),
        "qwen3_moe": make_checkpoint(folder / "qwen3_moe", "qwen3_moe", **heads),
    }


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "adapters"),
    [
        ("llama", 2, 2, None),
        ("qwen2", 2, 2, ADAPTERS),
        ("qwen3", 4, 1, ADAPTERS),
        pytest.param("qwen2", 1, 4, None, marks=pytest.mark.full),
        pytest.param("qwen3", 2, 1, None, marks=pytest.mark.full),
        pytest.param("llama", 4, 1, None, marks=pytest.mark.full),
        pytest.param("llama", 1, 2, ADAPTERS, marks=pytest.mark.full),
    ],
)
def test_a_rank_holds_what_was_planned(
    ranks: RankPool, models: dict[str, Path], family: str, tensor: int, pipeline: int, adapters: LoRASettings | None
) -> None:
    found: list[Built] = ranks.run(tensor * pipeline, built, models[family], tensor, pipeline, adapters, 1)
    assert {stage for stage, _ in found} == set(range(pipeline))
    for stage, held in found:
        assert planned(models[family], tensor, pipeline, stage, adapters, 1) == held


@pytest.mark.parametrize(("tensor", "pipeline", "expert"), [(2, 2, 2), pytest.param(1, 1, 4, marks=pytest.mark.full)])
def test_a_rank_holds_some_of_the_experts(
    ranks: RankPool, models: dict[str, Path], tensor: int, pipeline: int, expert: int
) -> None:
    """Of the first expert-parallel rank, whose numbers of experts are those of the model; all hold as many."""
    found: list[Built] = ranks.run(4, built, models["qwen3_moe"], tensor, pipeline, None, expert)
    for stage, held in found:
        assert planned(models["qwen3_moe"], tensor, pipeline, stage, None, expert) == held
        assert sum(".experts." in name for name in held) == 2 * (8 // expert) * {1: 3, 2: 1 if stage == 0 else 2}[pipeline]
