"""Transformer Engine's grouped experts on a GPU: logits, checkpoints of both kinds of layers, a complete run.

In fp32, for which a run does not take these layers, because they multiply in TF32. A token whose choice of experts is close
may be sent to others than those of transformers, so that a few tokens may differ.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.device import device
from nemo_kto.device.kernels import uses_transformer_engine
from nemo_kto.huggingface.hf_weights import load_weights
from nemo_kto.huggingface.peft import load_adapter
from nemo_kto.huggingface.rank_weights import rank_weights
from nemo_kto.models import gpt
from nemo_kto.models.lora.adapters import add_adapters
from tests.helpers import hf_models

pytestmark = [
    pytest.mark.skipif(not uses_transformer_engine(torch.bfloat16), reason="needs a GPU and Transformer Engine"),
    pytest.mark.usefixtures("one_rank"),
]


def built(folder: Path) -> tuple[Any, Any]:
    architecture = read_architecture(folder, tensor_parallel=1)
    model = gpt.build_gpt(architecture, params_dtype=torch.float32)
    load_weights([model], architecture, folder)
    return model, architecture


def assert_logits(model: Any, folder: Path) -> None:
    """Assert that the logits of nearly all tokens are those of transformers."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    here = tokens.to(device.current_device())
    with torch.no_grad():
        expected = theirs(tokens).logits
        hidden = model.eval()(here, torch.arange(64, device=here.device).expand_as(here), None)
        found = (hidden @ model.output_weight().T).float().cpu()
    wrong_bs = ((found[..., : expected.size(-1)] - expected).abs() > 2e-3 * expected.abs().max()).any(dim=-1)
    assert wrong_bs.float().mean() < 0.05


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_logits_equal_transformers(
    family: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "uses_transformer_engine", lambda dtype: True)
    folder = tiny_checkpoint(family)
    model, _ = built(folder)
    assert {type(layer.mlp.experts).__name__ for layer in model.decoder.layers if hasattr(layer.mlp, "experts")} == {
        "TEGroupedMLP"
    }
    assert_logits(model, folder)


def test_both_kinds_of_layers_have_the_same_weights_and_checkpoints(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names, keys = tiny_checkpoint("qwen3_moe"), [], []
    for engine in (True, False):
        monkeypatch.setattr(gpt, "uses_transformer_engine", lambda dtype, engine=engine: engine)
        model, architecture = built(folder)
        found = rank_weights([model], architecture)
        names.append({(weight.mapping.mcore_name, *weight.place.values()): weight.parameter.cpu() for weight in found})
        sharded = model.sharded_state_dict()
        keys.append({entry.key for name, entry in sharded.items() if not name.endswith("_extra_state")})
    grouped, single = names
    assert grouped.keys() == single.keys()
    assert all(torch.equal(values, single[name]) for name, values in grouped.items())
    assert keys[0] == keys[1]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapted_experts_equal_the_merged_model(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate experts in megatron-core's layers, among Transformer Engine's layers."""
    monkeypatch.setattr(gpt, "uses_transformer_engine", lambda dtype: True)
    folder, settings = tiny_checkpoint(family), LoRASettings(rank=2, alpha=4, target_modules=("all",))
    merged = hf_models.write_adapters(folder, tmp_path / "adapters", settings)
    architecture = read_architecture(folder, tensor_parallel=1)
    model = gpt.build_gpt(architecture, params_dtype=torch.float32, grouped_experts=False)
    add_adapters(model, settings, architecture=architecture, seed=1)
    load_weights([model], architecture, folder)
    load_adapter([model], architecture, tmp_path / "adapters")
    kinds = {
        type(linear).__name__
        for layer in model.decoder.layers
        if hasattr(layer.mlp, "experts")
        for expert in layer.mlp.experts.local_experts
        for linear in (expert.linear_fc1, expert.linear_fc2)
    }
    assert kinds == {"LoRAColumnParallelLinear", "LoRARowParallelLinear"}
    (tmp_path / "merged").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "merged")
    save_file(merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    assert_logits(model, tmp_path / "merged")
