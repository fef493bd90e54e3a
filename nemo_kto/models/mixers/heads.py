"""Exchange of heads between context-parallel ranks, for mixers whose states pass through all tokens of a sequence.

Each rank has some tokens of all heads. For the mixing it has all tokens of some heads (Jacobs et al. 2023, arXiv
2309.14509).

Shape suffixes: t tokens of a rank's share, T tokens of the whole pack, X values of all heads, x those of a rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from torch import Tensor

from nemo_kto.layers.packing import shard_tokens, unshard_tokens


def all_tokens(values_tX: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return all tokens of this rank's heads, [T, x]; ``lengths`` are those of the whole segments. Differentiable."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values_tX
    return unshard_tokens(all_to_all_sp2hp(values_tX, group=group), lengths, size=group.size())


def all_heads(values_Tx: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return all heads of this rank's tokens, [t, X]: the inverse of :func:`all_tokens`. Differentiable."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values_Tx
    values_tX: Tensor = all_to_all_hp2sp(shard_tokens(values_Tx, lengths, size=group.size()), group=group)
    return values_tX


def own_heads(weight: Tensor) -> Tensor:
    """Return the part of a weight, whose first dimension has the heads, of the heads of :func:`all_tokens`."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return weight.chunk(size)[rank]
