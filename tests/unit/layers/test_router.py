"""Ranks whose micro-batches must run in step because they share experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.layers.mlp import experts_span_copies
from nemo_kto.models.gpt import transformer_config
from tests.helpers.tiny_models import make_checkpoint


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor", "spans"),
    [
        (1, 1, 1, False),
        (1, 2, 1, True),
        (1, 1, 2, True),
        (2, 2, 1, False),  # the experts are shared out over ranks that have the same sequences
        (2, 1, 2, False),
        (4, 2, 1, False),
        (2, 2, 2, True),
        (2, 4, 1, True),
    ],
)
def test_experts_span_copies(tmp_path: Path, tensor: int, expert: int, expert_tensor: int, spans: bool) -> None:
    folder = make_checkpoint(tmp_path, "mixtral")
    architecture = read_architecture(folder, tensor_parallel=tensor, expert_tensor_parallel=expert_tensor)
    degree: dict[str, Any] = {"expert_model_parallel_size": expert}
    config = transformer_config(architecture, use_te=False, grouped_experts=True, params_dtype=torch.float32, **degree)
    assert experts_span_copies(config) == spans
