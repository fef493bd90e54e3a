"""What only a GPU can show of models that Transformer Engine has no layers for: their layers on torch, in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.huggingface.huggingface import load_weights
from nemo_kto.models.layers.block_attention import BLOCK, block_attention
from tests.helpers import hf_jobs, hf_models

pytestmark = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU that is used")
# Two or three times the error of bf16 on a CPU, and less than without any one of a model's caps, norms and factors there.
MODELS = {
    "gemma2": 0.04,
    "gemma3": 0.04,
    "gpt-oss": 0.15,
    "llama4": 0.15,
    "olmo2": 0.06,
    "phi3-part-of-each-head-longrope": 0.1,
    "smollm3-window-yarn-rope": 0.15,
}


@pytest.fixture
def _one_rank() -> Iterator[None]:
    state.init_distributed(layout=state.Layout(), seed=3)
    yield
    state.destroy()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_in_bf16(name: str, tmp_path: Path) -> None:
    hf_models.write_model(name, tmp_path)
    model, architecture = hf_jobs.build(tmp_path, state.Layout(), params_dtype=torch.bfloat16)
    linear = next(module for module_name, module in model.named_modules() if module_name.endswith(".linear_fc1"))
    assert isinstance(linear, ColumnParallelLinear)
    load_weights([model], architecture, tmp_path)
    tokens = hf_models.tokens().to(device.current_device())
    positions = torch.arange(tokens.size(1), device=tokens.device)[None].expand_as(tokens)
    with torch.no_grad():
        hidden = model.eval()(tokens, positions, None)
        found = hf_jobs.capped(model, (hidden @ model.output_weight().T).float()).cpu()
    expected = hf_models.transformers_logits(tmp_path)
    assert float((found - expected).norm() / expected.norm()) < MODELS[name]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("more", [{"cap": 2.0}, {"window": 50}], ids=["cap", "sinks and window"])
def test_block_attention_is_that_of_the_cpu(more: dict[str, Any], dtype: torch.dtype, close: float) -> None:
    """Values and gradients, over more than one block of queries; fp32 products may be those of TF32."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, heads, BLOCK + 72, 64, generator=draw).to(dtype) for heads in (8, 4, 4)]
    parts += [torch.randn(8, generator=draw).to(dtype)] * ("window" in more)
    settings = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.125, "enable_gqa": True, **more}
    found = []
    for place, kind in (("cpu", torch.float32), (device.current_device(), dtype)):
        here = [part.to(place, kind).requires_grad_() for part in parts]
        values = block_attention(*here[:3], **settings, sinks_h=here[3] if len(here) > 3 else None)
        found.append([values, *torch.autograd.grad(values.square().sum(), here)])
    for expected, other in zip(*found, strict=True):
        error = (other.float().cpu() - expected).norm() / expected.norm()
        assert float(error) < close
