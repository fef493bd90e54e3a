"""The planned parameters of a rank, compared with the built model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import PipelineSplit
from tests.helpers.rank_pool import RankPool

# Parameters of a rank: its stage, and name -> shape and whether it is trained.
Built = tuple[int, dict[str, tuple[tuple[int, ...], bool]]]
ADAPTERS = LoRASettings(rank=4, alpha=4, target_modules=("all",), layers=(1, 3))


def built(model: Path, tensor: int, split: PipelineSplit, adapters: LoRASettings | None, expert: int) -> Built:
    """The parameters of this rank of a model that is really built."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.distributed import state
    from nemo_kto.models.gpt import build_chunks
    from nemo_kto.models.lora.adapters import add_adapters

    virtual = split.chunks if split.chunks > 1 else None
    layout = state.Layout(tensor=tensor, pipeline=split.stages, virtual=virtual, expert=expert, expert_tensor=1)
    state.init_distributed(layout=layout, seed=1)
    architecture = read_architecture(model, tensor_parallel=tensor, expert_tensor_parallel=1)
    actual = {}
    for gpt in build_chunks(architecture, params_dtype=torch.float32, split=split, expert_parallel=expert):
        if adapters is not None:
            add_adapters(gpt, adapters, architecture=architecture, seed=1)
        for name, parameter in gpt.named_parameters():
            if name.startswith("decoder.layers."):
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                name = f"decoder.layers.{gpt.decoder.layers[int(number)].layer_number - 1}.{rest}"
            actual[name] = tuple(parameter.shape), parameter.requires_grad
    return state.pipeline_stage(), actual


def planned(
    model: Path, tensor: int, split: PipelineSplit, stage: int, adapters: LoRASettings | None, expert: int
) -> Mapping[str, Any]:
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.architecture.parameters import rank_parameters

    architecture = read_architecture(model, tensor_parallel=tensor, expert_tensor_parallel=1)
    found = rank_parameters(architecture, split=split, expert_parallel=expert, stage=stage, adapters=adapters)
    return {name: (each.shape, each.trained) for each in found for name in each.names}


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """A vocabulary and heads that need padding; tied and untied; biases, and norms on heads or on all of them."""
    changes: dict[str, dict[str, Any]] = {
        "gpt_oss": {"num_local_experts": 8},
        "llama": {"attention_bias": True, "mlp_bias": True},
    }
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    return lambda family: tiny_checkpoint(family, **heads, **changes.get(family, {}))


@pytest.mark.parametrize(
    ("family", "tensor", "split", "adapters"),
    [
        ("gemma2", 2, PipelineSplit(), None),
        pytest.param("llama", 2, PipelineSplit(stages=2), None, marks=pytest.mark.full),
        ("olmo2", 2, PipelineSplit(), ADAPTERS),
        ("qwen2", 2, PipelineSplit(stages=2, chunks=2), replace(ADAPTERS, dora=True)),
        pytest.param("qwen3", 4, PipelineSplit(), ADAPTERS, marks=pytest.mark.full),
        ("llama", 2, PipelineSplit(), replace(ADAPTERS, target_modules=("embed_tokens",), layers=None)),
        ("qwen3", 1, PipelineSplit(stages=3, chunks=2, counts_embedding=True, counts_loss=True), None),
    ],
)
def test_parameters_of_a_rank_equal_the_plan(
    ranks: RankPool,
    models: Callable[[str], Path],
    family: str,
    tensor: int,
    split: PipelineSplit,
    adapters: LoRASettings | None,
) -> None:
    found: list[Built] = ranks.run(tensor * split.stages, built, models(family), tensor, split, adapters, 1)
    assert {stage for stage, _ in found} == set(range(split.stages))
    for stage, actual in found:
        assert planned(models(family), tensor, split, stage, adapters, 1) == actual


@pytest.mark.parametrize(
    ("family", "tensor", "stages", "expert", "adapters"),
    [
        ("gpt_oss", 2, 1, 2, None),
        ("glm4_moe", 1, 1, 2, None),  # a correction bias, which is not trained
        pytest.param("qwen2_moe", 2, 2, 2, ADAPTERS, marks=pytest.mark.full),
        ("llama4_text", 2, 1, 2, ADAPTERS),  # on a layer's shared expert, and not on the others
        pytest.param("qwen3_moe", 1, 1, 4, None, marks=pytest.mark.full),
    ],
)
def test_parameters_of_experts_equal_the_plan(
    ranks: RankPool,
    models: Callable[[str], Path],
    family: str,
    tensor: int,
    stages: int,
    expert: int,
    adapters: LoRASettings | None,
) -> None:
    """The first expert-parallel rank numbers its experts as the model does; all ranks hold equally many."""
    split = PipelineSplit(stages=stages)
    found: list[Built] = ranks.run(max(tensor, expert) * stages, built, models(family), tensor, split, adapters, expert)
    for stage, actual in found:
        assert planned(models(family), tensor, split, stage, adapters, expert) == actual
        assert any(".experts." in name for name in actual)
