"""Transformer Engine's layers with shared prompts: the attention that is chosen, the positions of RoPE, and the results.

Transformer Engine is replaced by tests/helpers/engine_layers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint

# Two prompts, the first with three answers; one sequence of its own, one answer that is a token.
LENGTHS, PROMPTS = (9, 4, 1, 6, 7, 5, 3, 2), (None, 0, 0, 0, None, None, 5, 5)


def build(folder: Path, **settings: Any) -> Any:
    """A model with the weights of the folder."""
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.huggingface.hf_weights import load_weights
    from nemo_kto.models.gpt import build_gpt

    architecture = read_architecture(folder, tensor_parallel=1)
    model = build_gpt(architecture, params_dtype=torch.float32, **settings)
    load_weights([model], architecture, folder)
    return model


def of_a_pack(folder: Path) -> dict[str, Any]:
    """Hidden states and gradients of a pack, from models with the layers of Transformer Engine and without."""
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.checkpoint.sharded_state import sharded_weights
    from nemo_kto.distributed import state
    from nemo_kto.layers.attention import PackedSequences
    from nemo_kto.layers.packing import token_positions
    from tests.helpers.engine_layers import engine_layers

    state.init_distributed(layout=state.Layout(), seed=1)
    ours = build(folder)
    with engine_layers(read_architecture(folder, tensor_parallel=1)):
        sharing, plain = build(folder, share_prompts=True), build(folder)
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 200, (1, sum(LENGTHS)), generator=draw)
    weights = torch.randn(sum(LENGTHS), 1, generator=draw)

    def passes(model: Any, prompts: tuple[int | None, ...] | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        packed = PackedSequences.of([LENGTHS], [prompts])[0]
        hidden = model(tokens, token_positions(LENGTHS, prompts=prompts)[None], None, packed_seq_params=packed)[0]
        parameters = [each for name, each in model.named_parameters() if not name.startswith("output_layer")]
        return hidden, [*torch.autograd.grad((weights * hidden).sum(), parameters)]

    def difference(model: Any, prompts: tuple[int | None, ...] | None) -> dict[str, float]:
        (hidden, gradients), (expected, expected_gradients) = passes(model, prompts), passes(ours, prompts)
        scale = max(float(each.abs().max()) for each in expected_gradients)
        pairs = zip(gradients, expected_gradients, strict=True)
        return {
            "hidden": float((hidden - expected).abs().max() / expected.abs().max()),
            "gradients": max(float((a - b).abs().max()) for a, b in pairs) / scale,
        }

    def core(model: Any) -> list[str]:
        return [type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers]

    with pytest.raises(ValueError, match="share_prompts must be True") as error:
        passes(plain, PROMPTS)
    return {
        "classes": [core(model) for model in (ours, plain, sharing)],
        "positions matter": float((passes(ours, PROMPTS)[0] - passes(ours, None)[0]).detach().abs().max()),
        "shared": difference(sharing, PROMPTS),
        "separate": difference(sharing, None),
        "refused": str(error.value),
        "names": [sorted(sharded_weights([model], adapters=False)["model0"]) for model in (plain, sharing)],
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 6}), ("llama", {"rope_theta": 500.0})],
    ids=["llama", "qwen3", "window", "rope"],
)
def test_packs_equal_those_of_layers_without_the_engine(
    family: str, changes: dict[str, Any], ranks: RankPool, tmp_path: Path
) -> None:
    """Values agree to 1e-6, forward and backward; without shared prompts Transformer Engine's own attention computes."""
    (found,) = ranks.run(1, of_a_pack, make_checkpoint(tmp_path / "model", family, **changes))
    assert found["classes"] == [[name] * 4 for name in ("TorchAttention", "EngineAttention", "SharedPromptAttention")]
    assert found["positions matter"] > 0.1
    assert max(*found["shared"].values(), *found["separate"].values()) < 1e-6
    assert found["names"][0] == found["names"][1], "a checkpoint does not depend on it"
