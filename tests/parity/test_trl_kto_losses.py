"""numerics.md, point 4: TRL's own loss functions for unpaired feedback on random log-probs.

TRL 1.5.1 is the last release whose loss is a method of its trainer; it is called without a trainer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_kto.losses.kto import LOSSES, bco_losses, kl_reference_point, kl_sums, kto_metric_sums, kto_metrics, reward_sums
from nemo_kto.losses.metrics import RunningMean

kto_trainer = pytest.importorskip("trl.experimental.kto", reason="TRL 1.5.1 is the reference implementation")
bco_trainer = pytest.importorskip("trl.experimental.bco.bco_trainer", reason="TRL 1.5.1 is the reference implementation")
pytestmark = pytest.mark.parity


def trl_loss(name: str, logps: dict[str, torch.Tensor], *, beta: float, weights: tuple[float, float]) -> Any:
    """(losses, chosen rewards, rejected rewards, kl) as TRL computes them."""
    trainer = SimpleNamespace(
        calculate_KL=name == "kto",
        loss_type=name,
        beta=beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value),
    )
    kinds = ("chosen", "rejected", "KL")
    arguments = [logps[f"{who}_{kind}"] for who in ("policy", "reference") for kind in kinds]
    return kto_trainer.KTOTrainer.kto_loss(trainer, *arguments)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize(("num_chosen", "num_rejected"), [(5, 3), (8, 0), (0, 8), (1, 1)])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.33, 0.8)])
@pytest.mark.parametrize("shift", [9.0, -9.0], ids=["kl_positive", "kl_clamped"])
def test_kto_losses_rewards_kl_and_gradients(
    name: str, num_chosen: int, num_rejected: int, weights: tuple[float, float], shift: float
) -> None:
    torch.manual_seed(0)
    sizes = {"chosen": num_chosen, "rejected": num_rejected, "KL": num_chosen + num_rejected}
    logps = {f"reference_{kind}": -50 * torch.rand(size) for kind, size in sizes.items()}
    for kind, size in sizes.items():
        logps[f"policy_{kind}"] = (logps[f"reference_{kind}"] + 3 * torch.randn(size) + shift).requires_grad_()
    theirs, chosen_rewards, rejected_rewards, kl = trl_loss(name, logps, beta=0.1, weights=weights)

    def both(who: str) -> torch.Tensor:
        return torch.cat([logps[f"{who}_chosen"], logps[f"{who}_rejected"]])

    ratios = both("policy") - both("reference")
    desirable = torch.tensor([1] * num_chosen + [0] * num_rejected)
    valid = torch.ones_like(desirable, dtype=torch.bool)
    sums = kl_sums(logps["policy_KL"] - logps["reference_KL"], valid) if name == "kto" else {}
    anchor = {"z0": kl_reference_point(sums["kl_sum"], sums["kl_rows"])} if name == "kto" else {}
    ours = LOSSES[name].function(
        ratios, desirable, beta=0.1, desirable_weight=weights[0], undesirable_weight=weights[1], **anchor
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

    rows = {"preference_losses_N": ours, "sft_losses_N": -both("policy"), "log_ratios_N": ratios, "logps_N": both("policy")}
    rows |= {"weighted_preference_losses_N": ours, "weighted_sft_losses_N": torch.zeros_like(ours)}
    sums |= kto_metric_sums(**rows, sft_scale=1.0, desirable_N=desirable, valid_N=valid, beta=0.1)
    metrics = kto_metrics({key: value.item() for key, value in sums.items()})
    assert metrics["loss"] == pytest.approx(theirs.nanmean().item(), rel=1e-6)
    if name == "kto":
        assert metrics["kl"] == pytest.approx(kl.item(), rel=1e-6)
        assert (kl.item() > 0) == (shift > 0)
    for kind, rewards in {"chosen": chosen_rewards, "rejected": rejected_rewards}.items():
        assert (f"rewards_{kind}_mean" in metrics) == (len(rewards) > 0)
        if len(rewards):
            assert metrics[f"rewards_{kind}_mean"] == pytest.approx(rewards.mean().item(), rel=1e-5)

    present = [logps[f"policy_{kind}"] for kind in ("chosen", "rejected") if sizes[kind]]
    our_gradients = torch.autograd.grad(sums["loss_sum"] / len(desirable), present, retain_graph=True)
    their_gradients = torch.autograd.grad(theirs.mean(), present)
    for our_gradient, their_gradient in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("num_chosen", "num_rejected"), [(5, 3), (8, 0), (0, 8), (1, 1)])
def test_bco_losses_gradients_and_delta_of_several_steps(num_chosen: int, num_rejected: int) -> None:
    """delta is compared with TRL's RunningMoments."""
    torch.manual_seed(0)
    accelerator = SimpleNamespace(use_distributed=False)
    trainer = SimpleNamespace(
        beta=0.1, running=bco_trainer.RunningMoments(accelerator=accelerator), match_underlying_distribution=False
    )
    rewards, desirable = RunningMean(), torch.tensor([1] * num_chosen + [0] * num_rejected)
    for step in range(6):
        is_training = step != 3  # a validation
        reference = -50 * torch.rand(num_chosen + num_rejected)
        policy = (reference + 30 * torch.randn(len(reference)) + 10 * step).requires_grad_()
        parts = [logps.split([num_chosen, num_rejected]) for logps in (policy, reference)]
        theirs, _, _, their_delta = bco_trainer.BCOTrainer.bco_loss(
            trainer, *parts[0], *parts[1], None, None, do_train=is_training
        )

        if is_training:
            sums = reward_sums((policy - reference).detach(), torch.ones_like(desirable).bool(), beta=0.1)
            rewards = rewards.plus(sums["reward_sum"].item(), int(sums["reward_rows"]))
        assert rewards.mean == pytest.approx(their_delta.item(), rel=1e-6)
        ours = bco_losses(
            policy - reference,
            desirable,
            delta=torch.tensor(rewards.mean),
            beta=0.1,
            desirable_weight=1.0,
            undesirable_weight=1.0,
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        gradients = [torch.autograd.grad(losses.mean(), policy, retain_graph=True)[0] for losses in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)
