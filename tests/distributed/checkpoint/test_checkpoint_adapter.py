"""Checkpoints of adapters: small, resumed bitwise at their layout and closely at another, incompatible with others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.model_files.checkpoint_files import info_text
from tests.helpers import hf_models, lora_jobs
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool

ALL = LoRASettings(rank=3, alpha=6, target_modules=("all",))
DORA = replace(ALL, dora=True)
EMBEDDING = replace(ALL, target_modules=("embed_tokens",))
LAST_LAYER = LoRASettings(rank=3, alpha=6, target_modules=("q_proj", "v_proj", "mlp"), layers=(4,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    hf_models.write_model("llama-odd-heads", root / "llama")
    hf_models.write_model("mistral", root / "untied")
    return root / "llama"


def model_of(folder: Path, settings: LoRASettings) -> Path:
    """An embedding is adapted where it is not the output layer too."""
    return folder.with_name("untied") if settings is EMBEDDING else folder


ONE, TP2 = Layout(), Layout(tensor=2)
# name: adapters, layout, whether the optimizer is distributed, number of ranks
CASES: dict[str, tuple[LoRASettings, Layout, bool, int]] = {
    "one_rank": (replace(DORA, dropout=0.1), ONE, True, 1),
    "tp2": (replace(DORA, dropout=0.1), TP2, True, 2),  # generators that ranks share, and their own, continue as well
    "tp2_sequence_parallel": (ALL, Layout(tensor=2, sequence_parallel=True), True, 2),
    "dp2_replicated_optimizer": (ALL, ONE, False, 2),
    # the first stage, which writes what all ranks have in common, has nothing to train
    "pp2_last_layer": (LAST_LAYER, Layout(pipeline=2), True, 2),
    "pp2_embedding": (EMBEDDING, Layout(pipeline=2), True, 2),
    "tp2_pp2_last_layer_replicated_optimizer": (LAST_LAYER, Layout(tensor=2, pipeline=2), False, 4),
}


def whole_and_stopped(
    ranks: RankPool, world: int, layout: Layout, model: Path, settings: LoRASettings, root: Path, distributed: bool = True
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Norms of three steps on each rank, and the adapters after them; ``root``/run is a copy that ends after the first."""
    job = lora_jobs.train_and_save
    norms = ranks.run(world, job, layout, model, settings, root / "whole", 3, distributed, 1)
    shutil.copytree(root / "whole/step_000001", root / "run/step_000001")
    return norms, adapters(root / "whole/adapter-3")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case not in ("tp2", "pp2_last_layer"))) for case in CASES]
)
def test_resumes_bitwise(case: str, ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    settings, layout, distributed, world = CASES[case]
    model, run = model_of(folder, settings), tmp_path / "run"
    whole, expected = whole_and_stopped(ranks, world, layout, model, settings, tmp_path, distributed)
    parts = ranks.run(world, lora_jobs.train_and_save, layout, model, settings, run, 3, distributed)
    assert len(parts[0]) == 2
    assert parts == [norms[1:] for norms in whole]
    ours = adapters(run / "adapter-3")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


SETTINGS = {"all": ALL, "last_layer": LAST_LAYER, "dora": DORA, "embedding": EMBEDDING}
OTHERS = {
    "tp2": (2, TP2),
    "tp4": (4, Layout(tensor=4)),
    "dp2": (2, ONE),
    "tp2_pp2_sequence_parallel": (4, Layout(tensor=2, pipeline=2, sequence_parallel=True)),
}
PAIRS = [(settings, other) for settings in SETTINGS for other in OTHERS]


@pytest.mark.parametrize(
    ("name", "other"), [pytest.param(*pair, marks=[pytest.mark.full] * (pair != ("dora", "tp2"))) for pair in PAIRS]
)
def test_resumes_at_another_layout(name: str, other: str, ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    settings, run, job = SETTINGS[name], tmp_path / "run", lora_jobs.train_and_save
    model, (world, layout) = model_of(folder, settings), OTHERS[other]
    (norms,), expected = whole_and_stopped(ranks, 1, ONE, model, settings, tmp_path)
    for result in ranks.run(world, job, layout, model, settings, run, 3):
        assert result == pytest.approx(norms[1:], rel=1e-5)
    ours = adapters(run / "adapter-3")
    assert ours.keys() == expected.keys()
    for tensor, values in expected.items():
        assert (ours[tensor] - values).abs().max() < 1e-5, tensor
    # and back again: padding that came and went has left nothing behind
    assert ranks.run(1, job, ONE, model, settings, run, 3) == [[]]
    again = adapters(run / "adapter-3")
    for tensor, values in ours.items():  # a magnitude is written with the norm of its row, summed over other ranks
        torch.testing.assert_close(again[tensor], values, rtol=1e-6 if "magnitude" in tensor else 0, atol=0)


@pytest.fixture(scope="module")
def checkpoints(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of adapters, and one of a whole model."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, settings in {"adapters": LAST_LAYER, "model": None}.items():
        ranks.run(1, lora_jobs.train_and_save, ONE, folder, settings, root / name, 1)
    return {name: root / name / "step_000001" for name in ("adapters", "model")}


def test_a_checkpoint_contains_only_adapters_and_their_optimizer(checkpoints: dict[str, Path], folder: Path) -> None:
    info = {name: json.loads((checkpoint / "trainer.json").read_text()) for name, checkpoint in checkpoints.items()}
    settings = {"rank": 3, "alpha": 6, "dropout": 0.0, "target_modules": ["q_proj", "v_proj", "mlp"], "layers": [4]}
    assert info["adapters"]["adapters"] == {
        "base_model": str(folder), "settings": {**settings, "rslora": False, "dora": False, "experts": True},
    }  # fmt: skip
    assert "adapters" not in info["model"]
    sizes = {
        name: sum(kept["size"] for file, kept in of_one["files"].items() if file.startswith("state"))
        for name, of_one in info.items()
    }
    assert sizes["adapters"] < sizes["model"] / 5


def load_into(checkpoint: Path, folder: Path, settings: LoRASettings | None, layout: Layout = ONE) -> tuple[str, Any]:
    """On a rank: load a checkpoint's weights into a model that has just got base weights and new adapters.

    Returns:
        The error, and the largest change of a base weight and of an adapter.
    """
    from megatron.core.utils import unwrap_model

    from nemo_kto.checkpoint.manager import load_weights_only

    state.init_distributed(layout=layout, seed=3)
    chunks, _ = lora_jobs.build(folder, layout, settings)
    gpt = unwrap_model(chunks[0])
    before = {name: parameter.detach().clone() for name, parameter in gpt.named_parameters()}
    try:
        load_weights_only(checkpoint, chunks)
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        return f"{type(error).__name__}: {error}", None
    change = {"weight": 0.0, "adapter": 0.0}
    for name, parameter in gpt.named_parameters():
        kind = "adapter" if ".lora_" in name else "weight"
        change[kind] = max(change[kind], (parameter - before[name]).abs().max().item())
    return "", change


def test_weights_only(checkpoints: dict[str, Path], ranks: RankPool, folder: Path) -> None:
    for error, change in ranks.run(2, load_into, checkpoints["adapters"], folder, LAST_LAYER, TP2):
        assert error == ""
        assert change["weight"] == 0.0
        assert change["adapter"] > 0.05
    for error, change in ranks.run(2, load_into, checkpoints["model"], folder, LAST_LAYER, TP2):
        assert error == "", "a complete model serves as base model"
        assert change["weight"] > 1e-3
        assert change["adapter"] == 0.0


def test_adapters_that_do_not_fit_are_refused(checkpoints: dict[str, Path], ranks: RankPool, folder: Path) -> None:
    other = replace(LAST_LAYER, alpha=3, layers=(1, 2))
    modules = ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    described = {None: "none", other: f"rank 3, alpha 3, {', '.join(modules)} of layers 1, 2"}
    for settings, ours in described.items():
        ((error, _),) = ranks.run(1, load_into, checkpoints["adapters"], folder, settings)
        assert error == Message("UserError", "adapters", "3", "6", *modules, "4", ours, "model.peft", "folder")
    same = replace(LAST_LAYER, dropout=0.1, target_modules=("mlp", "v_proj", "q_proj"))
    ((error, _),) = ranks.run(1, load_into, checkpoints["adapters"], folder, same)
    assert error == ""


def test_a_missing_adapter_is_an_error(checkpoints: dict[str, Path], ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """A checkpoint that lacks what its trainer.json promises: adapters of one layer, said to be of two."""
    checkpoint = Path(shutil.copytree(checkpoints["adapters"], tmp_path / "step_000001"))
    info = json.loads((checkpoint / "trainer.json").read_text())
    info["adapters"]["settings"]["layers"] = [3, 4]
    (checkpoint / "trainer.json").write_text(info_text(info))
    ((error, _),) = ranks.run(1, load_into, checkpoint, folder, replace(LAST_LAYER, layers=(3, 4)))
    assert "decoder.layers.2.self_attention.linear_qkv.lora_a from model not in state dict" in error


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
