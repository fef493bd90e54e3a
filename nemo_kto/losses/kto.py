"""KTO and its variants: one loss per example, and the sums from which the metrics are computed.

Notation. r is the log-ratio of an example, log pi(y|x) - log pi_ref(y|x) over the tokens of its response y. beta r is its
reward. z0 is the reference point, an estimate of KL(pi || pi_ref). N is the number of examples.

Every loss takes log_ratios_N (r; fp32), desirable_N (1 or True for a desirable response, else 0 or False), beta (strength of
the constraint that keeps the policy close to the reference), desirable_weight and undesirable_weight (w_D and w_U), and
returns one loss per example, [N]. The KTO and APO-zero losses are between 0 and the weight of the example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_kto.losses.loss import Loss
from nemo_kto.losses.metrics import masked_sum, sample_std
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch, F = lazy_import("torch"), lazy_import("torch.nn.functional")


def kl_reference_point(log_ratio_sum: Tensor, count: Tensor) -> Tensor:
    """Estimate the KL divergence of policy and reference: z0 = max(0, sum of r / number of examples), 0-d, without gradient.

    The examples are prompts paired with the response to another prompt. Pass sums over the WHOLE global batch: because the
    estimate is clamped once, after the sum, it does not depend on how the batch is divided among ranks and micro-batches.
    Clamping parts of the batch and averaging the results would bias it upwards.

    Examples:
        >>> kl_reference_point(torch.tensor(3.0), torch.tensor(2)).item()
        1.5
        >>> kl_reference_point(torch.tensor(-3.0), torch.tensor(2)).item()
        0.0
        >>> kl_reference_point(torch.tensor(0.0), torch.tensor(0)).item()
        0.0
    """
    return (log_ratio_sum.detach() / count.clamp(min=1)).clamp(min=0).to(log_ratio_sum.dtype)


def kto_losses(
    log_ratios_N: Tensor, desirable_N: Tensor, *, z0: Tensor, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Return the KTO loss of each example (Ethayarajh et al. 2024, arXiv 2402.01306).

        desirable:    w_D (1 - sigmoid(beta (r - z0)))
        undesirable:  w_U (1 - sigmoid(beta (z0 - r)))

    z0 is the result of :func:`kl_reference_point`. No gradient flows through it.

    Examples:
        If policy and reference are the same model, the loss of each example is half its weight:

        >>> kto_losses(torch.zeros(2), torch.tensor([1, 0]), z0=torch.tensor(0.0), beta=0.1,
        ...            desirable_weight=1.0, undesirable_weight=2.0).tolist()
        [0.5, 1.0]
    """
    return _weighted_losses(log_ratios_N - z0.detach(), desirable_N, beta, desirable_weight, undesirable_weight)


def apo_zero_unpaired_losses(
    log_ratios_N: Tensor, desirable_N: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Return the unpaired APO-zero loss of each example (D'Oosterlinck et al. 2024, arXiv 2408.06266).

        desirable:    w_D (1 - sigmoid(beta r))
        undesirable:  w_U sigmoid(beta r)

    This is KTO with its reference point fixed at zero: it needs no KL examples.

    Examples:
        >>> apo_zero_unpaired_losses(torch.tensor([100.0, 100.0]), torch.tensor([1, 0]), beta=1.0,
        ...                          desirable_weight=1.0, undesirable_weight=1.0).tolist()
        [0.0, 1.0]
    """
    return _weighted_losses(log_ratios_N, desirable_N, beta, desirable_weight, undesirable_weight)


def bco_losses(
    log_ratios_N: Tensor,
    desirable_N: Tensor,
    *,
    delta: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Return the BCO loss of each example, that of a binary classifier of rewards (Jung et al. 2024, arXiv 2404.04656).

        desirable:    - w_D log sigmoid(beta r - delta)
        undesirable:  - w_U log sigmoid(-(beta r - delta))

    delta is the mean of the rewards beta r of all examples so far, including the current ones. No gradient flows through it.

    Examples:
        If policy and reference are the same model, the loss of each example is ln 2 times its weight:

        >>> bco_losses(torch.zeros(2), torch.tensor([1, 0]), delta=torch.tensor(0.0), beta=0.1,
        ...            desirable_weight=1.0, undesirable_weight=2.0).tolist()
        [0.6931471824645996, 1.3862943649291992]
    """
    gains_N = beta * log_ratios_N - delta.detach()
    signed_N, weights_N = _by_class(gains_N, desirable_N, desirable_weight, undesirable_weight)
    return -weights_N * F.logsigmoid(signed_N)


def _weighted_losses(
    gains_N: Tensor, desirable_N: Tensor, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    signed_N, weights_N = _by_class(gains_N, desirable_N, desirable_weight, undesirable_weight)
    return weights_N * torch.sigmoid(-beta * signed_N)  # 1 - sigmoid(x), without the cancellation for large x


def _by_class(
    gains_N: Tensor, desirable_N: Tensor, desirable_weight: float, undesirable_weight: float
) -> tuple[Tensor, Tensor]:
    desirable_N = desirable_N.bool()
    signed_N = torch.where(desirable_N, gains_N, -gains_N)
    return signed_N, torch.where(desirable_N, desirable_weight, undesirable_weight).to(gains_N.dtype)


INPUTS = frozenset({"beta", "desirable_weight", "undesirable_weight"})
"""Keyword arguments that every loss function must take."""

OPTIONAL_INPUTS = frozenset({"z0", "delta"})
"""Keyword arguments that the model computes for the loss functions that take them."""

LOSSES = {
    "kto": Loss(function=kto_losses),
    "apo_zero_unpaired": Loss(function=apo_zero_unpaired_losses),
    "bco": Loss(function=bco_losses),
}
"""Built-in losses, by their name in ``preference_loss``."""


def kl_sums(log_ratios_N: Tensor, valid_N: Tensor) -> dict[str, Tensor]:
    """Return the sums for :func:`kl_reference_point` over valid KL examples: ``kl_sum`` (float64), ``kl_rows`` (int64), 0-d.

    Examples:
        >>> sums = kl_sums(torch.tensor([1.0, 9.0, 2.0]), torch.tensor([True, False, True]))
        >>> sums["kl_sum"].item(), sums["kl_rows"].item()
        (3.0, 2)
    """
    return {"kl_sum": masked_sum(log_ratios_N, valid_N), "kl_rows": valid_N.sum()}


def reward_sums(log_ratios_N: Tensor, valid_N: Tensor, *, beta: float) -> dict[str, Tensor]:
    """Return the sums for delta of :func:`bco_losses` over valid examples: ``reward_sum`` (float64), ``reward_rows``.

    Examples:
        >>> sums = reward_sums(torch.tensor([1.0, 9.0, 2.0]), torch.tensor([True, False, True]), beta=0.5)
        >>> sums["reward_sum"].item(), sums["reward_rows"].item()
        (1.5, 2)
    """
    return {"reward_sum": masked_sum(beta * log_ratios_N.double(), valid_N), "reward_rows": valid_N.sum()}


def kto_metric_sums(
    *,
    weighted_preference_losses_N: Tensor,
    weighted_sft_losses_N: Tensor,
    sft_scale: float | Tensor,
    preference_losses_N: Tensor,
    sft_losses_N: Tensor,
    log_ratios_N: Tensor,
    logps_N: Tensor,
    desirable_N: Tensor,
    valid_N: Tensor,
    beta: float,
) -> dict[str, Tensor]:
    """Return the loss and metric sums of a micro-batch, which add exactly over micro-batches and ranks: 0-d tensors.

    The two terms of the loss are passed with all weights applied and without weights; the SFT term counts only for desirable
    examples. ``sft_scale`` is the number of valid examples of the global batch divided by the number of its desirable ones,
    because the gradient is divided by the number of all examples, while the SFT term is a mean over desirable ones.
    ``valid_N`` is True for examples with a response token; others are counted only in ``invalid_rows``.

    ``loss_sum`` is differentiable, has the dtype of the losses and is meaningful only within this global batch, because of
    ``sft_scale``. Other sums are float64 without gradient, counts are int64.
    """
    desirable_N, undesirable_N = valid_N & desirable_N.bool(), valid_N & ~desirable_N.bool()
    rewards_N = beta * log_ratios_N.detach().double()
    scaled_sft_N = torch.where(desirable_N, sft_scale * weighted_sft_losses_N, 0)
    return {
        "loss_sum": (torch.where(valid_N, weighted_preference_losses_N, 0) + scaled_sft_N).sum(),
        "weighted_preference_loss_sum": masked_sum(weighted_preference_losses_N, valid_N),
        "weighted_sft_loss_sum": masked_sum(weighted_sft_losses_N, desirable_N),
        "rows": valid_N.sum(),
        "invalid_rows": (~valid_N).sum(),
        "chosen_rows": desirable_N.sum(),
        "rejected_rows": undesirable_N.sum(),
        "preference_loss_sum": masked_sum(preference_losses_N, valid_N),
        "sft_loss_sum": masked_sum(sft_losses_N, desirable_N),
        "rewards_chosen_sum": masked_sum(rewards_N, desirable_N),
        "rewards_rejected_sum": masked_sum(rewards_N, undesirable_N),
        "rewards_square_sum": masked_sum(rewards_N.square(), valid_N),
        "logps_chosen_sum": masked_sum(logps_N, desirable_N),
        "logps_rejected_sum": masked_sum(logps_N, undesirable_N),
    }


def kto_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics from the sums of :func:`kto_metric_sums`, :func:`kl_sums` and delta over the global batch.

    loss is the mean preference term over all examples plus the mean SFT term over the desirable ones, 0 if no example is
    valid; kl_unclamped the mean log-ratio of the KL examples; kl the same, clamped at 0 (for a single global batch its
    reference point); same_prompt_pairs the number of KL examples with a response to their own prompt. The standard
    deviation is that of a sample. Metrics without examples are left out, such as those of an absent class.
    """
    rows = sums["rows"]
    preference_term = sums["weighted_preference_loss_sum"] / max(rows, 1)
    metrics = {"loss": preference_term + sums["weighted_sft_loss_sum"] / max(sums["chosen_rows"], 1)}
    if "kl_rows" in sums:
        metrics["kl_unclamped"] = sums["kl_sum"] / max(sums["kl_rows"], 1)
        metrics["kl"] = max(0.0, metrics["kl_unclamped"])
    if "delta_batches" in sums:
        metrics["delta"] = sums["delta_sum"] / sums["delta_batches"]
    if "same_prompt_pairs" in sums:
        metrics["same_prompt_pairs"] = sums["same_prompt_pairs"]
    for name in ("chosen", "rejected"):
        if count := sums[f"{name}_rows"]:
            metrics[f"rewards_{name}_mean"] = sums[f"rewards_{name}_sum"] / count
            metrics[f"logps_{name}_mean"] = sums[f"logps_{name}_sum"] / count
    if sums["chosen_rows"] and sums["rejected_rows"]:
        metrics["rewards_margin"] = metrics["rewards_chosen_mean"] - metrics["rewards_rejected_mean"]
    if sums["chosen_rows"]:
        metrics["sft_loss"] = sums["sft_loss_sum"] / sums["chosen_rows"]
    if rows:
        metrics["preference_loss"] = sums["preference_loss_sum"] / rows
        total = sums["rewards_chosen_sum"] + sums["rewards_rejected_sum"]
        metrics["rewards_all_mean"] = total / rows
        if rows > 1:
            metrics["rewards_all_std"] = sample_std(sums["rewards_square_sum"], total, rows)
    return metrics | {"rows": rows, "invalid_rows": sums["invalid_rows"]}
