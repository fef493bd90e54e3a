"""What only a GPU with Transformer Engine can show: its rotary embedding and attention with yarn and with parts of heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_kto.device import device
from nemo_kto.device.kernels import uses_transformer_engine
from nemo_kto.distributed import state
from nemo_kto.huggingface.huggingface import load_weights
from tests.helpers import hf_jobs, hf_models

pytestmark = pytest.mark.skipif(
    not uses_transformer_engine(torch.bfloat16), reason="needs a GPU that is used, and Transformer Engine"
)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    state.init_distributed(layout=state.Layout(), seed=3)
    yield
    state.destroy()


@pytest.mark.parametrize("name", ["llama-yarn-rope", "phi3-part-of-each-head"])
def test_logits_are_those_of_transformers_in_bf16(name: str, tmp_path: Path) -> None:
    """The error is that of bf16; without the attention factor, or with whole heads rotated, it is several times that."""
    hf_models.write_model(name, tmp_path)
    model, architecture = hf_jobs.build(tmp_path, state.Layout(), params_dtype=torch.bfloat16)
    load_weights([model], architecture, tmp_path)
    tokens = hf_models.tokens().to(device.current_device())
    positions = torch.arange(tokens.size(1), device=tokens.device)[None].expand_as(tokens)
    with torch.no_grad():
        found = (model.eval()(tokens, positions, None) @ model.output_weight().T).float().cpu()
    expected = hf_models.transformers_logits(tmp_path)
    assert float((found - expected).norm() / expected.norm()) < 0.1
