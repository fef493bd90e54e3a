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
from nemo_kto.artifacts.checkpoint_files import info_text
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from tests.helpers import hf_models, lora_jobs
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool

ALL = LoRASettings(rank=3, alpha=6, target_modules=("all",))
ONE_RANK = Layout()
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


CASES: dict[str, tuple[int, Layout, bool, LoRASettings]] = {
    "one_rank": (1, Layout(), True, replace(DORA, dropout=0.1)),  # random generators continue as well
    "tp2_sequence_parallel": (2, Layout(tensor=2, sequence_parallel=True), True, ALL),
    "dp2_replicated_optimizer": (2, Layout(), False, ALL),
    # the first stage, which writes what all ranks have in common, has nothing to train
    "pp2_last_layer": (2, Layout(pipeline=2), True, LAST_LAYER),
    "pp2_embedding": (2, Layout(pipeline=2), True, EMBEDDING),
    "tp2_pp2_last_layer_replicated_optimizer": (4, Layout(tensor=2, pipeline=2), False, LAST_LAYER),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] * (case not in ("one_rank", "pp2_last_layer"))) for case in CASES],
)
def test_resumes_bitwise(case: str, ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    world_size, layout, distributed, settings = CASES[case]
    folder = model_of(folder, settings)
    whole = ranks.run(world_size, lora_jobs.train_and_save, layout, folder, settings, tmp_path / "whole", 4, distributed)
    for steps in (2, 4):
        parts = ranks.run(
            world_size, lora_jobs.train_and_save, layout, folder, settings, tmp_path / "parts", steps, distributed
        )
    assert len(parts[0]) == 2
    assert parts == [norms[2:] for norms in whole]
    ours, theirs = adapters(tmp_path / "parts" / "adapter-4"), adapters(tmp_path / "whole" / "adapter-4")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def stopped(
    request: pytest.FixtureRequest, ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoRASettings, Path, list[float], dict[str, torch.Tensor]]:
    """A run on one rank after two steps, the gradient norms of all four, and the final adapters."""
    settings = {"all": ALL, "last_layer": LAST_LAYER, "dora": DORA, "embedding": EMBEDDING}[request.param]
    root, folder = tmp_path_factory.mktemp("stopped"), model_of(folder, settings)
    (norms,) = ranks.run(1, lora_jobs.train_and_save, Layout(), folder, settings, root / "whole", 4)
    ranks.run(1, lora_jobs.train_and_save, Layout(), folder, settings, root / "run", 2)
    return settings, root / "run", norms, adapters(root / "whole" / "adapter-4")


QUICK = ("dora", "tp2")
OTHERS = {
    "tp2": (2, Layout(tensor=2)),
    "tp4": (4, Layout(tensor=4)),
    "dp2": (2, Layout()),
    "tp2_pp2_sequence_parallel": (4, Layout(tensor=2, pipeline=2, sequence_parallel=True)),
}


@pytest.mark.parametrize(
    ("stopped", "other"),
    [
        pytest.param(settings, other, id=f"{settings}-{other}", marks=[pytest.mark.full] * ((settings, other) != QUICK))
        for settings in ("all", "last_layer", "dora", "embedding")
        for other in OTHERS
    ],
    indirect=["stopped"],
    scope="module",
)
def test_resumes_at_another_layout(other: str, stopped: Any, ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    settings, run, norms, expected = stopped
    folder = model_of(folder, settings)
    shutil.copytree(run, tmp_path / "run")
    world_size, layout = OTHERS[other]
    for result in ranks.run(world_size, lora_jobs.train_and_save, layout, folder, settings, tmp_path / "run", 4):
        assert result == pytest.approx(norms[2:], rel=1e-5)
    ours = adapters(tmp_path / "run" / "adapter-4")
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert (ours[name] - values).abs().max() < 1e-5, name
    # and back again: padding that came and went has left nothing behind
    (back,) = ranks.run(1, lora_jobs.train_and_save, Layout(), folder, settings, tmp_path / "run", 4)
    assert back == []
    again = adapters(tmp_path / "run" / "adapter-4")
    for name, values in ours.items():  # a magnitude is written with the norm of its row, summed over other ranks
        torch.testing.assert_close(again[name], values, rtol=1e-6 if "magnitude" in name else 0, atol=0)


def test_a_checkpoint_contains_only_adapters_and_their_optimizer(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    sizes = {}
    for name, settings in {"adapters": LAST_LAYER, "model": None}.items():
        ranks.run(1, lora_jobs.train_and_save, Layout(), folder, settings, tmp_path / name, 1)
        checkpoint = tmp_path / name / "checkpoints" if (tmp_path / name / "checkpoints").exists() else tmp_path / name
        info = json.loads((checkpoint / "step_000001" / "trainer.json").read_text())
        sizes[name] = sum(kept["size"] for file, kept in info["files"].items() if file.startswith("state"))
        if settings is None:
            assert "adapters" not in info
        else:
            assert info["adapters"] == {
                "base_model": str(folder),
                "settings": {
                    "rank": 3,
                    "alpha": 6,
                    "dropout": 0.0,
                    "target_modules": ["q_proj", "v_proj", "mlp"],
                    "layers": [4],
                    "rslora": False,
                    "dora": False,
                },
            }
    assert sizes["adapters"] < sizes["model"] / 5


def load_into(checkpoint: Path, folder: Path, settings: LoRASettings | None, layout: Layout = ONE_RANK) -> tuple[str, Any]:
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


@pytest.fixture(scope="module")
def checkpoints(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of adapters, and one of a whole model."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, settings in {"adapters": ALL, "model": None}.items():
        ranks.run(1, lora_jobs.train_and_save, Layout(), folder, settings, root / name, 1)
    return {name: root / name / "step_000001" for name in ("adapters", "model")}


def test_weights_only(checkpoints: dict[str, Path], ranks: RankPool, folder: Path) -> None:
    tp2 = Layout(tensor=2)
    for error, change in ranks.run(2, load_into, checkpoints["adapters"], folder, ALL, tp2):
        assert error == ""
        assert change["weight"] == 0.0
        assert change["adapter"] > 0.05
    for error, change in ranks.run(2, load_into, checkpoints["model"], folder, ALL, tp2):
        assert error == "", "a complete model serves as base model"
        assert change["weight"] > 1e-3
        assert change["adapter"] == 0.0


def test_adapters_that_do_not_fit_are_refused(checkpoints: dict[str, Path], ranks: RankPool, folder: Path) -> None:
    other = LoRASettings(rank=3, alpha=3, target_modules=("q_proj",), layers=(1, 2))
    ours = {None: "none", other: "rank 3, alpha 3, q_proj of layers 1, 2"}
    for settings, described in ours.items():
        ((error, _),) = ranks.run(1, load_into, checkpoints["adapters"], folder, settings)
        assert error == (
            Message(
                "UserError",
                "adapters",
                "3",
                "6",
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
                "all",
                f"{described}",
                "model.peft",
                "folder",
            )
        )
    same_but_dropout = LoRASettings(rank=3, alpha=6, dropout=0.1, target_modules=("attention", "mlp"))
    assert ranks.run(1, load_into, checkpoints["adapters"], folder, same_but_dropout)[0][0] == ""


def test_a_missing_adapter_is_an_error(checkpoints: dict[str, Path], ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """A checkpoint that lacks what its trainer.json promises: adapters of one layer, said to be of all."""
    ranks.run(1, lora_jobs.train_and_save, Layout(), folder, LAST_LAYER, tmp_path, 1)
    checkpoint = tmp_path / "step_000001"
    info = json.loads((checkpoint / "trainer.json").read_text())
    info["adapters"]["settings"]["layers"] = [3, 4]
    (checkpoint / "trainer.json").write_text(info_text(info))
    more = LoRASettings(rank=3, alpha=6, target_modules=("q_proj", "v_proj", "mlp"), layers=(3, 4))
    ((error, _),) = ranks.run(1, load_into, checkpoint, folder, more)
    assert "decoder.layers.2.self_attention.linear_qkv.lora_a from model not in state dict" in error


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
