"""Floating-point operations of a forward pass, from the architecture: what a model FLOPs utilisation (MFU) counts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_kto.models.architecture import Architecture
from nemo_kto.models.sequences import SequenceBatch


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Operations of the matrix products of the unpadded model (Narayanan et al. 2021, arXiv 2104.04473, appendix).

    Attributes:
        per_token: linear layers; two operations a weight.
        per_token_mlp: those of them that are in the MLPs.
        per_token_pair: attention scores and values, for each token and each token that it may see.
        per_response_token: the output layer, which only response tokens meet.
    """

    per_token: int
    per_token_mlp: int
    per_token_pair: int
    per_response_token: int

    @classmethod
    def of_model(cls, architecture: Architecture) -> ForwardFlops:
        """For one layout-independent copy of the model."""
        hidden, heads, groups = architecture.hidden_size, architecture.num_attention_heads, architecture.num_query_groups
        attention = hidden * architecture.head_dim * (2 * heads + 2 * groups)  # query and output, key and value
        mlps = sum(_mlp(architecture, sparse=sparse) for sparse in architecture.sparse_layers)
        return cls(
            per_token=2 * (architecture.num_layers * attention + mlps),
            per_token_mlp=2 * mlps,
            per_token_pair=4 * architecture.num_layers * heads * architecture.head_dim,
            per_response_token=2 * hidden * architecture.vocab_size,
        )

    def of_rows(self, rows: int, width: int) -> int:
        """Of one forward pass over so many rows of ``width`` tokens, all but the first of them an answer."""
        pairs = width * (width + 1) // 2
        return rows * (self.per_token * width + self.per_token_pair * pairs + self.per_response_token * (width - 1))

    def of(self, sequences: SequenceBatch) -> Tensor:
        """Of one forward pass over the sequences, without their padding: 0-d float64. Half of all pairs are causal."""
        lengths_B = sequences.lengths_B.double()
        pairs = (lengths_B * (lengths_B + 1) / 2).sum()
        responses = sequences.response_counts_B.sum()
        return self.per_token * lengths_B.sum() + self.per_token_pair * pairs + self.per_response_token * responses


def _mlp(architecture: Architecture, *, sparse: bool) -> int:
    """Weights that a token meets in a layer's MLP (gate, up, down), or in the router and the experts that see it."""
    hidden, experts = architecture.hidden_size, architecture.experts
    if not sparse or experts is None:
        return 3 * hidden * architecture.ffn_hidden_size
    shared = experts.shared_ffn_hidden_size
    of_shared = 3 * hidden * shared + hidden * experts.shared_gate if shared else 0
    return hidden * experts.number + experts.per_token * 3 * hidden * experts.ffn_hidden_size + of_shared


def training_passes(*, frozen: bool) -> int:
    """Forward and backward in units of a forward pass; frozen weights get no gradient, which is a third of the work."""
    return 2 if frozen else 3
