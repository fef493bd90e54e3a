"""Norms after attention and MLP at several layouts; tests/parity compares their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.helpers.rank_pool import RankPool


def kept_in_evaluation(model: Path) -> list[bool]:
    """Whether outputs of layers have an autograd graph although no gradient is needed."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.distributed import state
    from nemo_kto.models.gpt import build_gpt

    state.init_distributed(layout=state.Layout(), seed=1)
    gpt, kept = build_gpt(read_architecture(model, tensor_parallel=1), params_dtype=torch.float32), []
    for layer in gpt.decoder.layers:
        layer.register_forward_hook(lambda _, __, outputs: kept.append(outputs[0].requires_grad))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        gpt.eval()(tokens, torch.arange(4)[None], None)
    return kept


def test_nothing_is_saved_without_a_backward_pass(ranks: RankPool, tiny_checkpoint: Callable[..., Path]) -> None:
    assert ranks.run(1, kept_in_evaluation, tiny_checkpoint("olmo2")) == [[False] * 4]
