"""Losses for preference pairs: one loss per pair, and the sums from which the metrics are computed.

Notation. A pair is a chosen and a rejected answer to one prompt. r is the log-ratio of an answer,
log pi(y|x) - log pi_ref(y|x) over its tokens, and beta r is its reward. r_c and r_r are the log-ratios of the chosen and of
the rejected answer; h = r_c - r_r. P is the number of pairs. e is the argument label_smoothing.

Every loss takes chosen_logratios_P and rejected_logratios_P (r_c and r_r; fp32) and beta (strength of the constraint that
keeps the policy close to the reference), and returns one loss per pair, [P].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from nemo_kto.losses.loss import Loss
from nemo_kto.losses.metrics import masked_sum, sample_std, without_rounding_errors
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch, F = lazy_import("torch"), lazy_import("torch.nn.functional")

LabelSmoothing = Annotated[float, Ge(0), Lt(0.5)]
SmallProbability = Annotated[float, Gt(0), Lt(0.5)]
Temperature = Annotated[float, Gt(0)]
RewardScale = Annotated[float, Gt(0)]
Margin = Annotated[float, Ge(0)]
SFTWeight = Annotated[float, Ge(0)]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
_MAX_EXPONENT = 80.0  # of fp32: exp(89) is infinite, and the difference of two such values would not be a number


def divergence_margins(
    chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, divergence: Divergence, alpha: float
) -> Tensor:
    """Return the difference h of the scores of both answers in f-DPO (Wang et al. 2023, arXiv 2309.16240).

    Theorem 1 of the paper: the reward is beta f'(u) plus a constant that cancels, with u = pi / pi_ref = exp(r). From its
    table 1, the score f'(u) is

        reverse_kl        log u = r, the difference of log-ratios
        forward_kl        1 - 1/u
        js_divergence     log(2 u / (1 + u))
        alpha_divergence  (u^(alpha - 1) - 1) / (alpha - 1)

    ``alpha`` is that of TRL, 1 minus that of the paper: 1 is the reverse KL divergence, 0 the forward one.

    Examples:
        >>> chosen, rejected = torch.tensor([0.6931472]), torch.tensor([0.0])  # u = 2 and u = 1
        >>> [round(divergence_margins(chosen, rejected, name, 0.5).item(), 4) for name in ("forward_kl", "js_divergence")]
        [0.5, 0.2877]
    """
    if divergence == "reverse_kl":
        return chosen_logratios_P - rejected_logratios_P
    if divergence == "js_divergence":
        return F.logsigmoid(chosen_logratios_P) - F.logsigmoid(rejected_logratios_P)
    exponent = -1.0 if divergence == "forward_kl" else alpha - 1
    return _power_score(chosen_logratios_P, exponent) - _power_score(rejected_logratios_P, exponent)


def dpo_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    label_smoothing: LabelSmoothing = 0.0,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Tensor:
    """Return the DPO loss (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

        - (1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)

    With e above 0 this is conservative DPO, for data in which the order of a fraction e of the pairs is wrong.

    Examples:
        >>> round(dpo_losses(torch.zeros(1), torch.zeros(1), beta=0.1).item(), 6)
        0.693147
    """
    margins_P = divergence_margins(chosen_logratios_P, rejected_logratios_P, f_divergence_type, f_alpha_divergence_coef)
    return _smoothed_logistic(beta * margins_P, label_smoothing)


def ipo_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Tensor:
    """Return the IPO loss (Azar et al. 2023, arXiv 2310.12036, equation 17): (h - 1 / (2 beta))^2.

    beta is tau in the paper. If r is a mean over tokens, as in TRL, the target for h does not depend on the length of the
    answers.

    Examples:
        >>> ipo_losses(torch.tensor([2.0]), torch.tensor([1.0]), beta=0.5).item()
        0.0
    """
    margins_P = divergence_margins(chosen_logratios_P, rejected_logratios_P, f_divergence_type, f_alpha_divergence_coef)
    return (margins_P - 1 / (2 * beta)).square()


def hinge_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Tensor:
    """Return the hinge loss on the normalised likelihood (SLiC, Zhao et al. 2023, arXiv 2305.10425): max(0, 1 - beta h).

    beta is the reciprocal of the margin.

    Examples:
        >>> hinge_losses(torch.tensor([0.0, 9.0]), torch.tensor([0.0, 1.0]), beta=0.25).tolist()
        [1.0, 0.0]
    """
    margins_P = divergence_margins(chosen_logratios_P, rejected_logratios_P, f_divergence_type, f_alpha_divergence_coef)
    return torch.relu(1 - beta * margins_P)


def robust_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    label_smoothing: LabelSmoothing = 0.0,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Tensor:
    """Return the robust DPO loss (Chowdhury et al. 2024, arXiv 2403.00409).

        (- (1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)

    It is unbiased if the order of a fraction e of the pairs is wrong: its expectation over random flips of the pairs is the
    DPO loss of the pairs in their correct order. The loss of a single pair may be negative.
    """
    margins_P = divergence_margins(chosen_logratios_P, rejected_logratios_P, f_divergence_type, f_alpha_divergence_coef)
    logits_P = beta * margins_P
    unbiased_P = label_smoothing * F.logsigmoid(-logits_P) - (1 - label_smoothing) * F.logsigmoid(logits_P)
    return unbiased_P / (1 - 2 * label_smoothing)


def exo_pair_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    exo_label_smoothing: SmallProbability = 1e-3,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Tensor:
    """Return the EXO loss for pairs (Ji et al. 2024, arXiv 2402.00856, equation 16).

        KL(Bernoulli(sigmoid(beta h)) || Bernoulli(1 - p))

    p is exo_label_smoothing, the probability that the rejected answer is the better one.
    """
    preference = torch.logit(torch.tensor(1 - exo_label_smoothing, dtype=torch.float64)).to(chosen_logratios_P)
    margins_P = divergence_margins(chosen_logratios_P, rejected_logratios_P, f_divergence_type, f_alpha_divergence_coef)
    return _bernoulli_kl(beta * margins_P, preference)


def discopop_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    discopop_tau: Temperature = 0.05,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Tensor:
    """Return the DiscoPOP loss, the log-ratio modulated loss (Lu et al. 2024, arXiv 2406.08414, equation 5).

    (1 - m) (- log sigmoid(beta h)) + m exp(-beta h),    m = sigmoid(beta h / discopop_tau)
    """
    margins_P = divergence_margins(chosen_logratios_P, rejected_logratios_P, f_divergence_type, f_alpha_divergence_coef)
    logits_P = beta * margins_P
    modulation_P = logits_P / discopop_tau
    logistic_P = -F.logsigmoid(logits_P) * torch.sigmoid(-modulation_P)
    # a single exponential, because for large negative logits the two factors would be infinity and 0
    return logistic_P + torch.exp(F.logsigmoid(modulation_P) - logits_P)


def rpo_sq_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    reward_delta_P: Tensor,
    gt_reward_scale: RewardScale = 1.0,
) -> Tensor:
    """Return the squared loss of reward-aware preference optimisation (Sun et al. 2025, arXiv 2502.00203).

        (beta h - eta d)^2

    d is reward_delta_P, the chosen answer's reward in the data minus that of the rejected one; eta is gt_reward_scale.
    """
    return (beta * (chosen_logratios_P - rejected_logratios_P) - gt_reward_scale * reward_delta_P).square()


def rpo_bwd_kl_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    reward_delta_P: Tensor,
    gt_reward_scale: RewardScale = 1.0,
) -> Tensor:
    """Return the backward-KL loss of reward-aware preference optimisation (Nemotron-4 340B, arXiv 2406.11704).

        KL(Bernoulli(a) || Bernoulli(b)),    a = sigmoid(eta d),    b = sigmoid(beta h)

    a is the preference implied by the rewards in the data, b that of the policy. The loss is 0 if beta h = eta d. d and eta
    are defined in :func:`rpo_sq_losses`.
    """
    return _bernoulli_kl(gt_reward_scale * reward_delta_P, beta * (chosen_logratios_P - rejected_logratios_P))


def rpo_fwd_kl_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    reward_delta_P: Tensor,
    gt_reward_scale: RewardScale = 1.0,
) -> Tensor:
    """Return the forward-KL loss: that of :func:`rpo_bwd_kl_losses` with its arguments swapped.

        KL(Bernoulli(b) || Bernoulli(a))

    The names "backward" and "forward" are those of NeMo-Aligner.
    """
    return _bernoulli_kl(beta * (chosen_logratios_P - rejected_logratios_P), gt_reward_scale * reward_delta_P)


# Losses with a target for each answer rather than only for the difference of the two. Pairs only ensure that both answers
# have the same weight: all of these losses except APO-down could be used without pairs.


def nca_pair_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """Return the NCA loss for pairs (Chen et al. 2024, arXiv 2402.05369), with two answers per prompt.

        - log sigmoid(beta r_c) - 1/2 log sigmoid(-beta r_c) - 1/2 log sigmoid(-beta r_r)

    It prevents the likelihood of the chosen answer from falling: the first two terms are minimal at sigmoid(beta r_c) = 2/3.
    """
    chosen_rewards_P, rejected_rewards_P = beta * chosen_logratios_P, beta * rejected_logratios_P
    return -F.logsigmoid(chosen_rewards_P) - 0.5 * (F.logsigmoid(-chosen_rewards_P) + F.logsigmoid(-rejected_rewards_P))


def bco_pair_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """Return the BCO loss for pairs, without its reward shift (Jung et al. 2024, arXiv 2404.04656).

    - log sigmoid(beta r_c) - log sigmoid(-beta r_r)
    """
    return -F.logsigmoid(beta * chosen_logratios_P) - F.logsigmoid(-beta * rejected_logratios_P)


def sppo_hard_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """Return the SPPO loss with hard probabilities (Wu et al. 2024, arXiv 2405.00675, equation 4.7).

        (r_c - 1 / (2 beta))^2 + (r_r + 1 / (2 beta))^2

    The chosen answer wins with probability 1. beta is 1 / eta in the paper.
    """
    return (chosen_logratios_P - 0.5 / beta).square() + (rejected_logratios_P + 0.5 / beta).square()


def apo_zero_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """Return the APO-zero loss (D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 7).

        (1 - sigmoid(beta r_c)) + sigmoid(beta r_r)

    For data whose chosen answers are better than the model's: chosen answers become more likely, rejected ones less likely.
    """
    return torch.sigmoid(-beta * chosen_logratios_P) + torch.sigmoid(beta * rejected_logratios_P)


def apo_down_losses(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float) -> Tensor:
    """Return the APO-down loss (D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 8).

        sigmoid(beta r_c) + (1 - sigmoid(beta h))

    For data whose chosen answers are worse than the model's: both become less likely, the rejected answer more so.
    """
    difference_P = chosen_logratios_P - rejected_logratios_P
    return torch.sigmoid(beta * chosen_logratios_P) + torch.sigmoid(-beta * difference_P)


# Losses without a reference, which take the mean log-prob of the tokens of an answer in place of r; CPO the sum


def simpo_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    simpo_gamma: Margin = 0.5,
    label_smoothing: LabelSmoothing = 0.0,
) -> Tensor:
    """Return the SimPO loss (Meng et al. 2024, arXiv 2405.14734, equation 6).

        - log sigmoid(beta h - gamma)

    gamma is simpo_gamma, the margin by which the chosen answer must win. The paper uses a beta of 2 to 2.5, more than is
    usual with a reference. With e above 0 the loss is smoothed as in :func:`dpo_losses`.
    """
    return _smoothed_logistic(beta * (chosen_logratios_P - rejected_logratios_P) - simpo_gamma, label_smoothing)


def cpo_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    cpo_alpha: SFTWeight = 1.0,
    label_smoothing: LabelSmoothing = 0.0,
) -> Tensor:
    """Return the CPO loss, DPO with a uniform reference plus SFT on the chosen answer (Xu et al. 2024, arXiv 2401.08417).

    The first term is equation 3 of the paper, whose w is 1:

        - log sigmoid(beta h) - w log pi(chosen)

    w is cpo_alpha, 0 if another SFT term replaces this one. With e above 0 the first term is smoothed as in
    :func:`dpo_losses`.

    Examples:
        >>> round(cpo_losses(torch.tensor([-2.0]), torch.tensor([-2.0]), beta=0.1).item(), 6)
        2.693147
    """
    margins_P = chosen_logratios_P - rejected_logratios_P
    return _smoothed_logistic(beta * margins_P, label_smoothing) - cpo_alpha * chosen_logratios_P


def cpo_simpo_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    simpo_gamma: Margin = 0.5,
    cpo_alpha: SFTWeight = 1.0,
    label_smoothing: LabelSmoothing = 0.0,
) -> Tensor:
    """Return the CPO-SimPO loss, that of SimPO (arXiv 2405.14734) plus the SFT term of CPO (arXiv 2401.08417).

        - log sigmoid(beta h - gamma) - w m_chosen

    m is the mean log-prob of the tokens of an answer, w is cpo_alpha.
    """
    margins_P = chosen_logratios_P - rejected_logratios_P
    return _smoothed_logistic(beta * margins_P - simpo_gamma, label_smoothing) - cpo_alpha * chosen_logratios_P


def alphapo_losses(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: float,
    alphapo_alpha: float = 0.25,
    simpo_gamma: Margin = 0.5,
    label_smoothing: LabelSmoothing = 0.0,
) -> Tensor:
    """Return the AlphaPO loss, SimPO with another shape of the reward (Gupta et al. 2025, arXiv 2501.03884).

        - log sigmoid(s_chosen - s_rejected - gamma),    s = beta (1 - p^(-alpha)) / alpha

    p is the mean likelihood of a token, exp of the mean log-prob; alpha is alphapo_alpha. SimPO is the limit alpha = 0.

    Examples:
        >>> chosen, rejected = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()  # s is 1 - 2 and 1 - 4
        >>> round(alphapo_losses(chosen, rejected, beta=1.0, alphapo_alpha=1.0, simpo_gamma=2.0).item(), 4)
        0.6931
    """
    scores_P, other_P = (_power_score(logs_P, -alphapo_alpha) for logs_P in (chosen_logratios_P, rejected_logratios_P))
    return _smoothed_logistic(beta * (scores_P - other_P) - simpo_gamma, label_smoothing)


def orpo_losses(
    chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: float, orpo_sft_weight: SFTWeight = 1.0
) -> Tensor:
    """Return the ORPO loss, SFT on the chosen answer plus an odds ratio term (Hong et al. 2024, arXiv 2403.07691).

    Equations 6 and 7 of the paper:

        - w log p_chosen - beta log sigmoid(log odds_chosen - log odds_rejected),    odds = p / (1 - p)

    w is orpo_sft_weight, 0 if another SFT term replaces this one. beta is lambda in the paper.
    """
    log_odds_ratio_P = _log_odds(chosen_logratios_P) - _log_odds(rejected_logratios_P)
    return -orpo_sft_weight * chosen_logratios_P - beta * F.logsigmoid(log_odds_ratio_P)


# Losses that compare values of the same rank in the sorted global batch


def rank_partners(first_N: Tensor, second_N: Tensor) -> tuple[Tensor, Tensor]:
    """Match the values of two tensors by their rank in sorted order; pass those of the WHOLE global batch.

    Returns for each value of one tensor the value of the other with the same rank: [N] each, without gradient.

    Examples:
        >>> rank_partners(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([10.0, 20.0, 30.0]))
        (tensor([30., 10., 20.]), tensor([1., 2., 3.]))
    """
    first_N, second_N = first_N.detach(), second_N.detach()
    first_order_N, second_order_N = first_N.argsort(stable=True), second_N.argsort(stable=True)
    of_first_N, of_second_N = torch.empty_like(second_N), torch.empty_like(first_N)
    of_first_N[first_order_N], of_second_N[second_order_N] = second_N[second_order_N], first_N[first_order_N]
    return of_first_N, of_second_N


def aot_losses(
    first_P: Tensor,
    second_P: Tensor,
    *,
    beta: float,
    first_partners_P: Tensor,
    second_partners_P: Tensor,
    label_smoothing: LabelSmoothing = 0.0,
) -> Tensor:
    """Return the AOT loss, alignment via optimal transport (Melnyk et al. 2024, arXiv 2406.05882).

    Two sets of values, a and b, are sorted and compared by rank:

        sum over ranks k of g(a_(k) - b_(k)),    g(x) = - (1 - e) log sigmoid(beta x) - e log sigmoid(-beta x)

    So a value may be compared with a value of any other pair. Let b_p(i) and a_p(i) be the values with the same rank as a_i
    and b_i, and let sg denote stop-gradient. The loss of pair i is

        g(a_i - sg b_p(i)) + g(sg a_p(i) - b_i) - sg g(a_p(i) - b_i)

    Its value is g(a_i - b_p(i)); over all pairs each rank occurs once, so the losses add up to the sum above. Its gradient
    is g'(a_i - b_p(i)) with respect to a_i and -g'(a_p(i) - b_i) with respect to b_i, which is the gradient of the sum
    above, because a small step does not change the order. The pairs may therefore be distributed over micro-batches in any
    way.

    first_P and second_P are a and b: for AOT on pairs, the margins log pi(chosen) - log pi(rejected) under the policy and
    under the reference; for AOT on unpaired answers, the log-ratios of the chosen and of the rejected answers.
    first_partners_P and second_partners_P are b_p(i) and a_p(i), see :func:`rank_partners`.

    Examples:
        >>> a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> of_a, of_b = rank_partners(a, b)
        >>> aot_losses(a, b, beta=0.1, first_partners_P=of_a, second_partners_P=of_b).mean().item()
        0.6931471824645996
    """
    own_P = _smoothed_logistic(beta * (first_P - first_partners_P.detach()), label_smoothing)
    other_P = _smoothed_logistic(beta * (second_partners_P.detach() - second_P), label_smoothing)
    return own_P + other_P - other_P.detach()


def _power_score(logs_P: Tensor, exponent: float) -> Tensor:
    """Return (u^exponent - 1) / exponent of u = exp(logs), with its limit, the logs, for an exponent of 0."""
    return logs_P if exponent == 0 else torch.expm1((exponent * logs_P).clamp(max=_MAX_EXPONENT)) / exponent


def _smoothed_logistic(logits_P: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(logits_P) - label_smoothing * F.logsigmoid(-logits_P)


def _bernoulli_kl(logits_P: Tensor, other_P: Tensor) -> Tensor:
    """Return KL(Bernoulli(sigmoid(logits)) || Bernoulli(sigmoid(other)))."""
    yes_P = torch.sigmoid(logits_P) * (F.logsigmoid(logits_P) - F.logsigmoid(other_P))
    return yes_P + torch.sigmoid(-logits_P) * (F.logsigmoid(-logits_P) - F.logsigmoid(-other_P))


def _log_odds(logps_P: Tensor) -> Tensor:
    # expm1 keeps 1 - p accurate for p close to 1; p = 1 in fp32 is replaced by a value just below 1
    below_one_P = logps_P.clamp(max=-torch.finfo(logps_P.dtype).eps)
    return logps_P - torch.log(-torch.expm1(below_one_P))


INPUTS = frozenset({"beta"})
"""Keyword arguments that every loss function must take."""

OPTIONAL_INPUTS = frozenset({"reward_delta_P", "first_partners_P", "second_partners_P"})
"""Keyword arguments that the model computes for the loss functions that take them."""

LOSSES = {
    "dpo": Loss(function=dpo_losses),
    "ipo": Loss(function=ipo_losses),
    "hinge": Loss(function=hinge_losses),
    "robust": Loss(function=robust_losses),
    "exo_pair": Loss(function=exo_pair_losses),
    "nca_pair": Loss(function=nca_pair_losses),
    "bco_pair": Loss(function=bco_pair_losses),
    "sppo_hard": Loss(function=sppo_hard_losses),
    "apo_zero": Loss(function=apo_zero_losses),
    "apo_down": Loss(function=apo_down_losses),
    "discopop": Loss(function=discopop_losses),
    "aot": Loss(function=aot_losses, sorts="margins"),
    "aot_unpaired": Loss(function=aot_losses, sorts="answers"),
    "rpo_sq": Loss(function=rpo_sq_losses),
    "rpo_bwd_kl": Loss(function=rpo_bwd_kl_losses),
    "rpo_fwd_kl": Loss(function=rpo_fwd_kl_losses),
    "simpo": Loss(function=simpo_losses, needs_reference=False, average_log_probs=True),
    "orpo": Loss(function=orpo_losses, needs_reference=False, average_log_probs=True),
    "sigmoid_norm": Loss(function=dpo_losses, average_log_probs=True),
    "cpo": Loss(function=cpo_losses, needs_reference=False),
    "cpo_simpo": Loss(function=cpo_simpo_losses, needs_reference=False, average_log_probs=True),
    "alphapo": Loss(function=alphapo_losses, needs_reference=False, average_log_probs=True),
}
"""Built-in losses, by their name in ``preference_loss``."""


def preference_metric_sums(
    *,
    weighted_preference_losses_P: Tensor,
    weighted_sft_losses_P: Tensor,
    sft_scale: float | Tensor,
    sft_counts_P: Tensor,
    preference_losses_P: Tensor,
    sft_losses_P: Tensor,
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    chosen_logps_P: Tensor,
    rejected_logps_P: Tensor,
    valid_P: Tensor,
    beta: float,
    means_P: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the loss and metric sums of a micro-batch, which add exactly over micro-batches and ranks: 0-d tensors.

    The two terms of the loss are passed with all weights applied and without weights. ``sft_counts_P`` is the contribution
    of each pair to the denominator of the SFT term: 1, or its number of tokens. ``sft_scale`` is the number of valid pairs
    of the global batch divided by the sum of their ``sft_counts_P``, because the gradient is divided by the number of pairs,
    while the SFT term is divided by that sum. ``valid_P`` is True if both answers have a token; other pairs are counted only
    in ``invalid_rows``. ``means_P`` are the values whose means over pairs are further metrics, by name.

    ``loss_sum`` is differentiable, has the dtype of the losses and is meaningful only within this global batch, because of
    ``sft_scale``. Other sums are float64 without gradient, counts are int64.
    """
    chosen_rewards_P = beta * chosen_logratios_P.detach().double()
    rejected_rewards_P = beta * rejected_logratios_P.detach().double()
    margins_P = chosen_rewards_P - rejected_rewards_P
    sides = (chosen_logratios_P, chosen_logps_P), (rejected_logratios_P, rejected_logps_P)
    chosen_P, rejected_P = (without_rounding_errors(*side) for side in sides)  # the ties of an AUC
    return {
        "loss_sum": torch.where(valid_P, weighted_preference_losses_P + sft_scale * weighted_sft_losses_P, 0).sum(),
        "weighted_preference_loss_sum": masked_sum(weighted_preference_losses_P, valid_P),
        "weighted_sft_loss_sum": masked_sum(weighted_sft_losses_P, valid_P),
        "sft_count": masked_sum(sft_counts_P, valid_P),
        "rows": valid_P.sum(),
        "invalid_rows": (~valid_P).sum(),
        "correct": (valid_P & (chosen_P > rejected_P)).sum(),
        "preference_loss_sum": masked_sum(preference_losses_P, valid_P),
        "sft_loss_sum": masked_sum(sft_losses_P, valid_P),
        "rewards_chosen_sum": masked_sum(chosen_rewards_P, valid_P),
        "rewards_rejected_sum": masked_sum(rejected_rewards_P, valid_P),
        "rewards_square_sum": masked_sum(chosen_rewards_P.square() + rejected_rewards_P.square(), valid_P),
        "margin_square_sum": masked_sum(margins_P.square(), valid_P),
        "logps_chosen_sum": masked_sum(chosen_logps_P, valid_P),
        "logps_rejected_sum": masked_sum(rejected_logps_P, valid_P),
        **{f"{_MEAN}{name}": masked_sum(values_P, valid_P) for name, values_P in (means_P or {}).items()},
    }


_MEAN = "mean/"  # begins the name of a sum that is reported as a mean over pairs


def preference_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics from the sums of :func:`preference_metric_sums` over the global batch.

    loss is the mean preference term plus the mean SFT term, 0 if no pair is valid; acc the fraction of the pairs whose
    chosen answer has the higher reward. Standard deviations are those of a sample. Metrics without pairs are left out.
    """
    rows, sft_count = sums["rows"], max(sums["sft_count"], 1)
    metrics = {"loss": sums["weighted_preference_loss_sum"] / max(rows, 1) + sums["weighted_sft_loss_sum"] / sft_count}
    if rows:
        metrics["preference_loss"] = sums["preference_loss_sum"] / rows
        metrics["sft_loss"] = sums["sft_loss_sum"] / sft_count
        metrics["acc"] = sums["correct"] / rows
        metrics |= {name.removeprefix(_MEAN): total / rows for name, total in sums.items() if name.startswith(_MEAN)}
        for name in ("chosen", "rejected"):
            metrics[f"rewards_{name}_mean"] = sums[f"rewards_{name}_sum"] / rows
            metrics[f"logps_{name}_mean"] = sums[f"logps_{name}_sum"] / rows
        margin = sums["rewards_chosen_sum"] - sums["rewards_rejected_sum"]
        total = sums["rewards_chosen_sum"] + sums["rewards_rejected_sum"]
        metrics["rewards_margin"] = margin / rows
        if rows > 1:
            metrics["rewards_margin_std"] = sample_std(sums["margin_square_sum"], margin, rows)
        metrics["rewards_all_mean"] = total / (2 * rows)
        metrics["rewards_all_std"] = sample_std(sums["rewards_square_sum"], total, 2 * rows)
    return metrics | {"rows": rows, "invalid_rows": sums["invalid_rows"]}
