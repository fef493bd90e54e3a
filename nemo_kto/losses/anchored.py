"""Losses of pairs that tell each answer where to go, and do not only look at the difference of the two.

Notation and arguments are those of ``losses.preference``: r_c and r_r are the log-ratios of the chosen and of the rejected
answer, h their difference. A pair is only that both count the same, and all but APO-down could do without pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_kto.utils.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch, F = lazy_import("torch"), lazy_import("torch.nn.functional")


def nca_pair_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """NCA for pairs (Chen et al. 2024, arXiv 2402.05369), with two answers to a prompt.

        - log sigmoid(beta r_c) - 1/2 log sigmoid(-beta r_c) - 1/2 log sigmoid(-beta r_r)

    It holds the likelihood of the chosen answer up: the first two terms are least at sigmoid(beta r_c) = 2/3.
    """
    chosen_P, rejected_P = beta * chosen_logratios_P, beta * rejected_logratios_P
    return -F.logsigmoid(chosen_P) - 0.5 * (F.logsigmoid(-chosen_P) + F.logsigmoid(-rejected_P))


def bco_pair_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """BCO for pairs, without its shift of rewards (Jung et al. 2024, arXiv 2404.04656).

    - log sigmoid(beta r_c) - log sigmoid(-beta r_r)
    """
    return -F.logsigmoid(beta * chosen_logratios_P) - F.logsigmoid(-beta * rejected_logratios_P)


def sppo_hard_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """SPPO with hard probabilities, 1 of the chosen answer to win (Wu et al. 2024, arXiv 2405.00675, equation 4.7).

        (r_c - 1 / (2 beta))^2 + (r_r + 1 / (2 beta))^2

    beta is 1 / eta in the paper.
    """
    return (chosen_logratios_P - 0.5 / beta).square() + (rejected_logratios_P + 0.5 / beta).square()


def apo_zero_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 7): (1 - sigmoid(beta r_c)) + sigmoid(beta r_r).

    For data whose chosen answers are better than those of the model: it makes them more likely and the rejected ones less.
    """
    return torch.sigmoid(-beta * chosen_logratios_P) + torch.sigmoid(beta * rejected_logratios_P)


def apo_down_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 8): sigmoid(beta r_c) + (1 - sigmoid(beta h)).

    For data whose chosen answers are worse than those of the model: both become less likely, the rejected ones more so.
    """
    difference_P = chosen_logratios_P - rejected_logratios_P
    return torch.sigmoid(beta * chosen_logratios_P) + torch.sigmoid(-beta * difference_P)
