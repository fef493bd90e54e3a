"""Context parallelism: results and gradients equal one rank, for padded and packed sequences."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import lora_jobs
from tests.helpers.engines import engine
from tests.helpers.rank_pool import RankPool

HEADS, GROUPS, HEAD_DIM = 6, 2, 4


def attention(*, context: int, window: tuple[int, int] | None, chunked: bool) -> Any:
    """With a window that slides; with ``chunked`` one that does not, and queries that grow in the place of a rotation."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_kto.architecture.rope import read_rope
    from nemo_kto.layers.attention import TorchAttention
    from nemo_kto.layers.layer_settings import Temperature
    from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        attention_dropout=0.0,
        window_size=window,
        context_parallel_size=context,
    )
    groups = ProcessGroupCollection(cp=parallel_state.get_context_parallel_group())
    rope = read_rope({"rope_theta": 1e4, "hidden_size": HEAD_DIM, "num_attention_heads": 1})
    grows = TemperatureTable(temperature=Temperature(floor=3, scale=0.7))
    places: dict[str, Any] = {"chunked": True, "temperature": grows} if chunked else {"rope": RopeTable(rope=rope)}
    return TorchAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups, cp_comm_type="p2p", **places)


def differences(
    size: int, lengths: tuple[int, ...], packed: bool, window: tuple[int, int] | None, chunked: bool
) -> list[float]:
    """On a rank: how much its outputs and gradients differ from those of the whole row on one rank."""
    from nemo_kto.distributed import state
    from nemo_kto.layers.attention import PackedSequences
    from nemo_kto.layers.packing import local_token_indices

    rank, tokens = state.rank(), sum(lengths)
    draw = torch.Generator().manual_seed(0)
    batch = () if packed else (2,)
    heads = [torch.randn(tokens, *batch, number, HEAD_DIM, generator=draw) for number in (HEADS, GROUPS, GROUPS)]
    grad = torch.randn(tokens, *batch, HEADS * HEAD_DIM, generator=draw)
    place_t = local_token_indices(lengths, rank=rank, size=size)
    row = PackedSequences.of([lengths])[0] if packed else None
    whole = [each.clone().requires_grad_() for each in heads]
    expected = attention(context=1, window=window, chunked=chunked)(*whole, None, packed_seq_params=row)
    own = [each[place_t].clone().requires_grad_() for each in heads]
    found = attention(context=size, window=window, chunked=chunked)(*own, None, packed_seq_params=row)
    found_grads, expected_grads = torch.autograd.grad(found, own, grad[place_t]), torch.autograd.grad(expected, whole, grad)
    pairs = [(found, expected), *zip(found_grads, expected_grads, strict=True)]
    return [float((mine - other[place_t]).abs().max()) for mine, other in pairs]


CASES: dict[int, list[tuple[tuple[int, ...], bool, tuple[int, int] | None, bool]]] = {
    2: [
        ((16,), False, None, False),
        ((16,), False, (4, 0), False),
        ((4, 12, 8), True, None, False),
        ((16,), False, (4, 0), True),
        ((4, 12, 8), True, (4, 0), True),
    ],
    4: [((8, 24), True, (4, 0), False)],
}


def every_difference(size: int) -> list[list[float]]:
    from nemo_kto.distributed import state

    state.init_distributed(layout=state.Layout(context=size), seed=1)
    return [differences(size, *case) for case in CASES[size]]


@pytest.mark.parametrize("size", CASES)
def test_outputs_and_gradients_equal_one_rank(ranks: RankPool, size: int) -> None:
    for of_rank in ranks.run(size, every_difference, size):
        for case, found in zip(CASES[size], of_rank, strict=True):
            assert max(found) < 2e-6, case


def shares(size: int, length: int) -> tuple[list[int], list[int]]:
    """On a rank: the places of its tokens, and those that megatron-core gives it."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    from nemo_kto.distributed import state
    from nemo_kto.layers.packing import local_token_indices

    state.init_distributed(layout=state.Layout(context=size), seed=1)
    needed = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}  # 0.19
    theirs = get_batch_on_this_cp_rank({"tokens": torch.arange(length)[None]}, **needed)["tokens"]
    return local_token_indices((length,), rank=state.rank(), size=size).tolist(), theirs[0].tolist()


def test_shards_equal_megatron_core(ranks: RankPool) -> None:
    for ours, theirs in ranks.run(4, shares, 4, 24):
        assert ours == theirs


def answers(lengths: tuple[int, ...], multiple: int) -> Any:
    """Sequences whose first token is the prompt, in rows of a width that is a multiple."""
    from nemo_kto.models.engine.sequences import SequenceBatch

    width = -(-max(lengths) // multiple) * multiple
    tokens = torch.randint(1, 256, (len(lengths), 32), generator=torch.Generator().manual_seed(3))[:, :width]
    length_B = torch.tensor(lengths)
    is_response = (torch.arange(width) > 0) & (torch.arange(width) < length_B[:, None])
    return SequenceBatch.of(tokens, torch.where(is_response, tokens, -100), length_B)


def sequence_logps(model: Path, context: int, lengths: tuple[int, ...]) -> list[list[float]]:
    """On a rank: log-probs of sequences, their sums and their means, in rows as wide as the ranks need."""
    from dataclasses import replace

    from nemo_kto.distributed import state

    runs = engine(*lora_jobs.build(model, state.Layout(context=context), distributed=False))
    both = [replace(runs, average_log_probs=average) for average in (False, True)]
    return [each.logprobs(answers(lengths, 2 * context)).tolist() for each in both]


def test_sequences_shorter_than_the_chunks(ranks: RankPool, tiny_llama: Path) -> None:
    lengths = (2, 3, 7, 5)
    (expected,) = ranks.run(1, sequence_logps, tiny_llama, 1, lengths)
    for found in ranks.run(4, sequence_logps, tiny_llama, 4, lengths):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
