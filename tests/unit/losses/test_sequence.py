"""From token log-probs to sequence log-probs: positions, sums, and sequences without response tokens."""

from __future__ import annotations

import doctest

import pytest
import torch

from nemo_kto.losses import sequence
from nemo_kto.losses.sequence import response_counts, response_positions, sequence_sums

LABELS = torch.tensor(
    [
        [-100, -100, 11, 12, 13],
        [7, 8, -100, -100, -100],  # the first column has nothing before it that predicts it
        [-100, -100, -100, -100, -100],
        [-100, 20, -100, 21, -100],  # two responses in one row (several turns)
    ]
)


def test_docstring_examples() -> None:
    assert doctest.testmod(sequence).failed == 0
    assert doctest.testmod(sequence).attempted > 0


def test_a_hidden_state_predicts_the_token_after_it() -> None:
    sequence_T, position_T, target_T = response_positions(LABELS)
    assert sequence_T.tolist() == [0, 0, 0, 1, 3, 3]
    assert position_T.tolist() == [1, 2, 3, 0, 0, 2]
    assert target_T.tolist() == [11, 12, 13, 8, 20, 21]
    assert torch.equal(LABELS[sequence_T, position_T + 1], target_T)


def test_token_0_is_a_token() -> None:
    assert response_positions(torch.tensor([[-100, 0]]))[2].tolist() == [0]
    assert response_counts(torch.tensor([[-100, 0]])).tolist() == [1]


def test_only_sequences_with_a_response_have_positions() -> None:
    valid_B = response_counts(LABELS) > 0
    assert valid_B.tolist() == [True, True, False, True]
    assert valid_B.nonzero().squeeze(1).tolist() == response_positions(LABELS)[0].unique().tolist()


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (2, 1)])
def test_no_response_tokens(shape: tuple[int, int]) -> None:
    labels = torch.full(shape, 3)
    sequence_T, position_T, target_T = response_positions(labels)
    assert len(sequence_T) == len(position_T) == len(target_T) == 0
    assert sequence_sums(torch.zeros(0), sequence_T, shape[0], average=True).tolist() == [0.0] * shape[0]
    assert response_counts(labels).tolist() == [0] * shape[0]


def test_sums_and_means() -> None:
    logps_T = torch.tensor([-1.0, -2.0, -3.0, -10.0, -0.5, -0.25])
    sequence_T = response_positions(LABELS)[0]
    assert sequence_sums(logps_T, sequence_T, 4, average=False).tolist() == [-6.0, -10.0, 0.0, -0.75]
    assert sequence_sums(logps_T, sequence_T, 4, average=True).tolist() == [-2.0, -10.0, 0.0, -0.375]


def test_tokens_of_one_sequence_on_several_ranks() -> None:
    """The mean is over the tokens of all ranks, and not a mean of means."""
    sums = []

    def over_ranks(own: torch.Tensor) -> torch.Tensor:
        sums.append(own)
        return sum(sums, start=torch.zeros_like(own))

    for average, expected in ((False, [-9.0, -4.0]), (True, [-3.0, -4.0])):
        sums.clear()
        sequence_sums(torch.tensor([-1.0, -2.0]), torch.tensor([0, 0]), 2, average=average, over_ranks=over_ranks)
        parts_T, of_T = torch.tensor([-6.0, -4.0]), torch.tensor([0, 1])
        assert sequence_sums(parts_T, of_T, 2, average=average, over_ranks=over_ranks).tolist() == expected


def test_the_sum_of_a_long_row_is_rounded_once() -> None:
    torch.manual_seed(0)
    logps_T = -torch.rand(20000) * 9
    sequence_T = torch.zeros(20000, dtype=torch.int64)
    total = sequence_sums(logps_T, sequence_T, 1, average=False)
    assert total.dtype == torch.float32
    assert total.item() == logps_T.double().sum().float().item()
    assert torch.equal(sequence_sums(logps_T.flip(0), sequence_T, 1, average=False), total)


@pytest.mark.parametrize("average", [False, True])
def test_gradient(average: bool) -> None:
    logps_T = torch.randn(6, dtype=torch.float64, requires_grad=True)
    sequence_T = response_positions(LABELS)[0]
    assert torch.autograd.gradcheck(lambda logps: sequence_sums(logps, sequence_T, 4, average=average), (logps_T,))
