"""Scope of fp8: every layer of the model and nothing else; weights are quantised again after each step.

The effect of the context needs a GPU; these tests record which modules enter it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import transformer_block
from megatron.core.utils import unwrap_model

from nemo_kto.distributed import state
from nemo_kto.models.engine import engine as engine_module
from nemo_kto.models.engine.sequences import SequenceBatch
from tests.helpers import engines, lora_jobs
from tests.helpers.rank_pool import RankPool


def entered(folder: Path, fp8: str | None) -> dict[str, Any]:
    """Layers that enter the context in two passes of two micro-batches, and the modules inside it."""
    chunks, architecture = lora_jobs.build(folder, state.Layout(), fp8=fp8)
    layers: list[int] = []
    inside: set[str] = set()
    depth = [0]

    @contextlib.contextmanager
    def context(config: Any, layer: int) -> Iterator[None]:
        layers.append(layer)
        depth[0] += 1
        yield
        depth[0] -= 1

    def note(name: str) -> Any:
        return lambda *_: inside.add(f"{name}: {depth[0]}")

    gpt = unwrap_model(chunks[0])
    linear = gpt.decoder.layers[0].mlp.linear_fc1
    linear.register_forward_pre_hook(note("linear"))
    gpt.embedding.register_forward_pre_hook(note("embedding"))
    linear.is_first_microbatch = False  # Transformer Engine's word for "quantise the weight again"
    runs = engines.engine(chunks, architecture)
    tokens = torch.randint(0, architecture.vocab_size, (6, 16))
    batch = SequenceBatch.of(tokens, tokens, torch.full((6,), 16))
    head = engine_module.vocab_parallel_logprobs

    def recorded(*arguments: Any, **options: Any) -> Any:
        note("head")()
        return head(*arguments, **options)

    with (
        mock.patch.object(transformer_block, "get_fp8_context", context),
        mock.patch.object(engine_module, "vocab_parallel_logprobs", recorded),
    ):
        runs.logprobs(batch)
    return {"layers": layers, "inside": sorted(inside), "again": linear.is_first_microbatch}


def test_only_layers_are_in_fp8(ranks: RankPool, tiny_llama: Path) -> None:
    (found,) = ranks.run(1, entered, tiny_llama, "hybrid")
    assert found["layers"] == [0, 1] * 2, "each layer of each micro-batch"
    assert found["inside"] == ["embedding: 0", "head: 0", "linear: 1"]
    assert found["again"], "swapped and updated weights are quantised again, before the first micro-batch of each pass"
    (in_bf16,) = ranks.run(1, entered, tiny_llama, None)
    assert (in_bf16["layers"], in_bf16["again"]) == ([], False)
