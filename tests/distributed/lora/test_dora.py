"""DoRA: dropout against peft, the number of norm computations, padding, and bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from tests.distributed.lora.test_lora import check_steps, steps_of_peft
from tests.helpers import hf_models, lora_jobs
from tests.helpers.hf_models import peft_model
from tests.helpers.rank_pool import RankPool

NAME = "llama-all-biases-linear-rope"
SETTINGS = LoRASettings(rank=2, alpha=2, dropout=0.25, target_modules=("q_proj", "o_proj", "mlp"), layers=(1, 3), dora=True)
LAYOUTS = {
    "one_rank": Layout(),
    "tp2": Layout(tensor=2),
    "tp2_sequence_parallel": Layout(tensor=2, sequence_parallel=True),
}


def drop_negative(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """In the place of torch's dropout: the values decide, so that it is the same at every layout and in peft."""
    return values.relu() / (1 - p) if training and p else values


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter in peft's own hand."""
    root = tmp_path_factory.mktemp("dora")
    hf_models.write_model(NAME, root / "model")
    peft_model(root / "model", SETTINGS).save_pretrained(root / "adapter")
    return root / "model", root / "adapter"


def steps(layout: Layout, folder: Path, adapter: Path, out: Path) -> list[float]:
    with mock.patch("torch.nn.functional.dropout", drop_negative):
        return lora_jobs.gradients_and_steps(layout, {"dropped": (folder, adapter, SETTINGS)}, out, {})["dropped"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "tp2_sequence_parallel")) for name in LAYOUTS]
)
def test_dropout_applies_to_the_same_values_as_in_peft(
    name: str, ranks: RankPool, model: tuple[Path, Path], tmp_path: Path
) -> None:
    layout, (folder, adapter) = LAYOUTS[name], model
    results = ranks.run(layout.tensor, steps, layout, folder, adapter, tmp_path)
    with mock.patch("torch.nn.functional.dropout", drop_negative):
        expected = steps_of_peft(peft_model(folder, SETTINGS).train())
    check_steps(results, tmp_path / "dropped", folder, expected)


def norms_taken(folder: Path) -> list[int]:
    """How often norms are taken: by two steps of four micro-batches each, and outside of a step."""
    from nemo_kto.models.lora import lora_layers

    state.init_distributed(layout=Layout(), seed=3)
    chunks, _ = lora_jobs.build(folder, Layout(), SETTINGS)
    optimizer, found = lora_jobs.optimizer_of(chunks), []
    with mock.patch.object(lora_layers, "row_norms", wraps=lora_layers.row_norms) as taken:
        for _ in range(2):
            lora_jobs.backward(chunks)
            optimizer.step()
            found.append(taken.call_count)
        with torch.no_grad():
            for _ in range(2):
                chunks[0](lora_jobs.tokens(0), torch.arange(lora_jobs.SEQUENCE)[None], None)
                found.append(taken.call_count)
    return found


def test_norms_are_computed_once_for_all_micro_batches(ranks: RankPool, model: tuple[Path, Path]) -> None:
    layers = 2 * 4
    assert ranks.run(1, norms_taken, model[0]) == [[layers, 2 * layers, 3 * layers, 4 * layers]]


def in_half_precision(layout: Layout, folder: Path) -> tuple[bool, list[bool]]:
    """Whether new adapters in bf16 leave the model unchanged, and whether a small step changes all magnitudes."""
    from megatron.core.utils import unwrap_model

    from nemo_kto.models.lora.adapters import disable_adapters

    state.init_distributed(layout=layout, seed=3)
    settings = LoRASettings(rank=2, alpha=2, target_modules=("all",), dora=True)
    chunks, _ = lora_jobs.build(folder, layout, settings, dtype=torch.bfloat16)
    inputs: Any = (lora_jobs.tokens(0), torch.arange(lora_jobs.SEQUENCE)[None], None)
    with torch.no_grad():
        new = chunks[0](*inputs)
        with disable_adapters(chunks):
            is_base = torch.equal(new, chunks[0](*inputs))
    optimizer = lora_jobs.optimizer_of(chunks, dtype=torch.bfloat16)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5  # next to a norm above 1, less than a hundredth of what bf16 can tell apart
    lora_jobs.backward(chunks)
    optimizer.step()
    named = unwrap_model(chunks[0]).named_parameters()
    moved = [(values != 0).float().mean().item() > 0.9 for name, values in named if name.endswith("lora_magnitude")]
    return is_base, moved


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name != "tp2")) for name in LAYOUTS])
def test_half_precision(name: str, ranks: RankPool, model: tuple[Path, Path]) -> None:
    layout = LAYOUTS[name]
    assert ranks.run(layout.tensor, in_half_precision, layout, model[0]) == [(True, [True] * 16)] * layout.tensor
