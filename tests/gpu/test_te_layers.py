"""Transformer Engine's layers with adapters against peft, and checkpoints exchanged with megatron-core's layers.

Everything is in fp32, for which a run does not take these layers, because they multiply in TF32: the tolerances are those of
such products, and still tighter than those of bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.checkpoint.manager import newest_checkpoint
from nemo_kto.device import device
from nemo_kto.device.kernels import uses_transformer_engine
from nemo_kto.distributed import state
from nemo_kto.huggingface.peft import load_adapter
from nemo_kto.models import gpt
from nemo_kto.models.lora import adapters
from nemo_kto.models.lora.adapters import disable_adapters, merge_adapters
from tests.helpers import lora_jobs
from tests.helpers.hf_models import peft_model

pytestmark = [
    pytest.mark.skipif(not uses_transformer_engine(torch.bfloat16), reason="needs a GPU and Transformer Engine"),
    pytest.mark.usefixtures("one_rank"),
]
SETTINGS = LoRASettings(rank=4, alpha=8, target_modules=("all",))
DORA = replace(SETTINGS, dora=True)
CLOSE: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3}  # logits and gradients of about 1


def logits(chunks: list[Any], tokens: torch.Tensor) -> torch.Tensor:
    model = unwrap_model(chunks[0]).eval()
    with torch.no_grad():
        positions = torch.arange(tokens.size(1), device=tokens.device)[None]
        return (model(tokens, positions, None) @ model.output_weight().T).float().cpu()


def names_of_adapted(chunks: list[Any]) -> set[str]:
    return {type(module).__name__ for chunk in chunks for module in chunk.modules() if isinstance(module, adapters.Adapter)}


@pytest.mark.parametrize("settings", [SETTINGS, DORA], ids=["lora", "dora"])
def test_adapters_equal_peft(
    settings: LoRASettings, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "uses_transformer_engine", lambda dtype: True)
    folder = tiny_checkpoint("llama")
    theirs = peft_model(folder, settings)
    theirs.save_pretrained(tmp_path / "adapter")
    chunks, architecture = lora_jobs.build(folder, state.Layout(), settings)
    assert names_of_adapted(chunks) == {"LoRATELayerNormColumnParallelLinear", "LoRATERowParallelLinear"}
    load_adapter(chunks, architecture, tmp_path / "adapter")
    tokens = lora_jobs.tokens(0)
    with torch.no_grad():
        expected = theirs(tokens).logits
        with theirs.disable_adapter():
            base = theirs(tokens).logits
    here = tokens.to(device.current_device())
    width = expected.size(-1)
    assert float((expected - base).abs().max()) > 0.1
    torch.testing.assert_close(logits(chunks, here)[..., :width], expected, **CLOSE)
    with disable_adapters(chunks):
        torch.testing.assert_close(logits(chunks, here)[..., :width], base, **CLOSE)
    merge_adapters(chunks)
    torch.testing.assert_close(logits(chunks, here)[..., :width], expected, **CLOSE)


def trained(
    folder: Path, settings: LoRASettings | None, run: Path, *, resumed: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """Two steps, saved after the first, or only the second, resumed: trained weights, and the last gradient norm."""
    chunks, _ = lora_jobs.build(folder, state.Layout(), settings)
    if settings is not None:
        lora_jobs._perturb_b(chunks)
    optimizer = lora_jobs.optimizer_of(chunks)
    manager = lora_jobs.manager_of(chunks, optimizer, run, folder)
    if resumed:
        newest = newest_checkpoint(run)
        assert newest is not None
        manager.load(newest)
    norms = []
    for number in (2,) if resumed else (1, 2):
        lora_jobs.backward(chunks)
        norms.append(float(optimizer.step()[1]))
        if number == 1:
            manager.save({"step": 1}, {})
    named = unwrap_model(chunks[0]).named_parameters()
    return {name: weight.detach().clone() for name, weight in named if weight.requires_grad}, norms[-1]


@pytest.mark.parametrize("settings", [None, SETTINGS, DORA], ids=["weights", "adapters", "dora"])
@pytest.mark.parametrize("engine_first", [True, False], ids=["engine_to_local", "local_to_engine"])
def test_checkpoints_are_exchanged_between_both_kinds_of_layers(
    engine_first: bool,
    settings: LoRASettings | None,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_checkpoint("qwen3")  # with norms of query and key
    monkeypatch.setattr(gpt, "uses_transformer_engine", lambda dtype: engine_first)
    whole, norm = trained(folder, settings, tmp_path, resumed=False)
    monkeypatch.setattr(gpt, "uses_transformer_engine", lambda dtype: not engine_first)
    parts, norm_after = trained(folder, settings, tmp_path, resumed=True)
    assert norm_after == pytest.approx(norm, rel=1e-2)
    same = whole.keys() & parts.keys()  # all but the norms before linear layers
    assert len(same) >= 4 * 4, "four linear layers in each of four layers"
    for name in same:
        torch.testing.assert_close(parts[name], whole[name], **CLOSE)
