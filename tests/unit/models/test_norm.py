from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.models.norm import TorchNorm


def config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": "RMSNorm", **settings}
    )


def test_rms_norm() -> None:
    norm = TorchNorm(config(), hidden_size=8, eps=1e-2)
    values = torch.randn(3, 8)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-2).sqrt() * torch.arange(8.0)
    torch.testing.assert_close(norm(values), expected)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parameters_tell_of_sequence_parallelism(sequence_parallel: bool) -> None:
    settings = config(
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    for parameter in TorchNorm(config=settings, hidden_size=4, eps=1e-6).parameters():
        assert parameter.sequence_parallel is sequence_parallel
        assert parameter.dtype == torch.bfloat16


def test_another_norm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"normalization must be RMSNorm, got 'LayerNorm'"):
        TorchNorm(config(normalization="LayerNorm"), hidden_size=8)


def test_zero_centred_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma must be False"):
        TorchNorm(config(layernorm_zero_centered_gamma=True), hidden_size=8)
