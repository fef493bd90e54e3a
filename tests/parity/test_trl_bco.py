"""BCO's loss against TRL's own function, and its delta over several steps against TRL's RunningMoments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nemo_kto.losses.kto import bco_losses, reward_sums
from nemo_kto.losses.metrics import RunningMean

trl = pytest.importorskip("trl.experimental.bco.bco_trainer", reason="TRL 1.5.1 is the oracle")
pytestmark = pytest.mark.parity
BETA = 0.1


@pytest.mark.parametrize(("num_chosen", "num_rejected"), [(5, 3), (8, 0), (0, 8), (1, 1)])
def test_losses_gradients_and_delta_of_several_steps(num_chosen: int, num_rejected: int) -> None:
    torch.manual_seed(0)
    accelerator = SimpleNamespace(use_distributed=False)
    trainer = SimpleNamespace(
        beta=BETA, running=trl.RunningMoments(accelerator=accelerator), match_underlying_distribution=False
    )
    rewards, desirable = RunningMean(), torch.tensor([1] * num_chosen + [0] * num_rejected)
    for step in range(6):
        is_training = step != 3  # a validation
        reference = -50 * torch.rand(num_chosen + num_rejected)
        policy = (reference + 30 * torch.randn(len(reference)) + 10 * step).requires_grad_()
        parts = [logps.split([num_chosen, num_rejected]) for logps in (policy, reference)]
        theirs, _, _, their_delta = trl.BCOTrainer.bco_loss(trainer, *parts[0], *parts[1], None, None, do_train=is_training)

        if is_training:
            sums = reward_sums((policy - reference).detach(), torch.ones_like(desirable).bool(), beta=BETA)
            rewards = rewards.plus(sums["reward_sum"].item(), int(sums["reward_rows"]))
        assert rewards.mean == pytest.approx(their_delta.item(), rel=1e-6)
        ours = bco_losses(
            policy - reference,
            desirable,
            delta=torch.tensor(rewards.mean),
            beta=BETA,
            desirable_weight=1.0,
            undesirable_weight=1.0,
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        gradients = [torch.autograd.grad(losses.mean(), policy, retain_graph=True)[0] for losses in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)
