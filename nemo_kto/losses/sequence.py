"""Reduction of token log-probs to one value per sequence.

Shape suffixes: B sequences in a padded batch, S tokens per sequence, T response tokens in the whole batch, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

IGNORED = -100
"""Label of tokens that are not part of a response, that is, prompt and padding."""


def response_positions(labels_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the response tokens of a batch: index of the sequence, position of the predicting hidden state, and token id.

    The hidden state at position t - 1 predicts the token at position t. A response token in the first column is therefore
    left out. Labels are the token ids of response tokens, not shifted, and ``IGNORED`` elsewhere. The results are [T],
    int64, ordered by sequence and then by position.

    Examples:
        >>> labels = torch.tensor([[-100, -100, 7, 8], [-100, 9, -100, -100]])
        >>> sequence, position, target = response_positions(labels)
        >>> sequence.tolist(), position.tolist(), target.tolist()
        ([0, 0, 1], [1, 2, 0], [7, 8, 9])
    """
    targets = labels_BS[:, 1:]
    is_response = targets != IGNORED
    sequence_T, position_T = is_response.nonzero(as_tuple=True)
    return sequence_T, position_T, targets[is_response]


def response_counts(labels_BS: Tensor) -> Tensor:
    """Return the number of response tokens of each sequence that :func:`response_positions` finds: [B], int64.

    Examples:
        >>> response_counts(torch.tensor([[-100, 5, 6], [5, -100, -100]])).tolist()
        [2, 0]
    """
    return (labels_BS[:, 1:] != IGNORED).sum(dim=1)


def sequence_sums(
    token_logps_T: Tensor,
    sequence_T: Tensor,
    num_sequences: int,
    *,
    average: bool,
    over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Sum the token log-probs of each sequence, or average them: [N], 0 for a sequence without tokens; differentiable.

    The sum is computed in float64 and rounded once, so it does not depend on the order of the tokens. ``over_ranks`` sums
    its argument over all ranks that hold tokens of these sequences; it is called once and must be differentiable.

    Examples:
        >>> logps, sequences = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([0, 0, 2])
        >>> sequence_sums(logps, sequences, 3, average=False).tolist()
        [-3.0, 0.0, -4.0]
        >>> sequence_sums(logps, sequences, 3, average=True).tolist()
        [-1.5, 0.0, -4.0]
    """
    sums_N = token_logps_T.new_zeros(num_sequences, dtype=torch.float64).index_add(0, sequence_T, token_logps_T.double())
    if not average:
        return over_ranks(sums_N).to(token_logps_T.dtype)
    # not bincount, which synchronises with the device to read the largest value
    counts_N = torch.zeros_like(sums_N).index_add(0, sequence_T, torch.ones_like(token_logps_T, dtype=torch.float64))
    sums_N, counts_N = over_ranks(torch.stack((sums_N, counts_N)))
    return (sums_N / counts_N.clamp(min=1)).to(token_logps_T.dtype)
