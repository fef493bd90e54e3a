"""numerics.md, point 4: the loss of TRL 1.16's KTO trainer, from logits on, without a trainer.

BCO, which 1.16 no longer has, is compared with steps of 1.5.1 in test_trl_kto_steps.py.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_kto.losses.kto import LOSSES, kl_reference_point, kl_sums, kto_metric_sums, kto_metrics
from tests.helpers.trl_losses import ACCELERATOR, VOCABULARY, WIDTH, KnownLogits, answer_logps, random_tokens

KTOTrainer = pytest.importorskip("trl.trainer.kto_trainer", reason="TRL is the reference implementation").KTOTrainer
pytestmark = pytest.mark.parity


def trl_loss(
    name: str, policy: KnownLogits, reference: KnownLogits, inputs: dict[str, torch.Tensor], weights: tuple[float, float]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of TRL's KTOTrainer, and its metrics."""
    trainer: Any = SimpleNamespace(
        model=policy.eval(),
        ref_model=reference.eval(),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        calculate_KL=name == "kto",
        loss_type=name,
        beta=0.1,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        precompute_ref_logps=False,
        aux_loss_enabled=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    loss = KTOTrainer._compute_loss(trainer, policy, inputs, return_outputs=False)
    return loss, {key: values[0] for key, values in trainer._metrics["eval"].items() if isinstance(values, list)}


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize(("num_chosen", "num_rejected"), [(5, 3), (8, 0), (0, 8), (1, 1)])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.33, 0.8)])
@pytest.mark.parametrize("shift", [1.0, -1.0], ids=["kl_positive", "kl_clamped"])
def test_kto_losses_rewards_kl_and_gradients(
    name: str, num_chosen: int, num_rejected: int, weights: tuple[float, float], shift: float
) -> None:
    torch.manual_seed(0)
    rows = num_chosen + num_rejected
    (tokens, mask), (kl_tokens, kl_mask) = random_tokens(rows), random_tokens(rows)
    reference, kl_reference = (torch.randn(rows, WIDTH, VOCABULARY) for _ in range(2))
    policy = (reference + torch.randn_like(reference)).requires_grad_()
    # the logits before each token are those of the token
    following = torch.nn.functional.one_hot(kl_tokens.roll(-1, dims=1), VOCABULARY)
    kl_policy = kl_reference + shift * following
    desirable = torch.tensor([1] * num_chosen + [0] * num_rejected)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask, "label": desirable}
    inputs |= {f"KL_{key}": value for key, value in zip(inputs, (kl_tokens, torch.ones_like(tokens), kl_mask), strict=False)}
    both = (kl_policy, policy), (kl_reference, reference)
    models = [KnownLogits(*(logits if name == "kto" else logits[1:])) for logits in both]
    theirs, logged = trl_loss(name, models[0], models[1], inputs, weights)

    logps = answer_logps(policy, tokens, mask)
    ratios, valid = logps - answer_logps(reference, tokens, mask), torch.ones_like(desirable, dtype=torch.bool)
    kl_ratios = answer_logps(kl_policy, kl_tokens, kl_mask) - answer_logps(kl_reference, kl_tokens, kl_mask)
    sums = kl_sums(kl_ratios, valid) if name == "kto" else {}
    anchor = {"z0": kl_reference_point(sums["kl_sum"], sums["kl_rows"])} if name == "kto" else {}
    ours = LOSSES[name].function(
        ratios, desirable, beta=0.1, desirable_weight=weights[0], undesirable_weight=weights[1], **anchor
    )
    losses = {"preference_losses_N": ours, "sft_losses_N": -logps, "log_ratios_N": ratios, "logps_N": logps}
    losses |= {"weighted_preference_losses_N": ours, "weighted_sft_losses_N": torch.zeros_like(ours)}
    sums |= kto_metric_sums(**losses, sft_scale=1.0, desirable_N=desirable, valid_N=valid, beta=0.1)
    metrics = kto_metrics({key: value.item() for key, value in sums.items()})
    assert metrics["loss"] == pytest.approx(theirs.item(), rel=1e-6)
    if name == "kto":
        assert metrics["kl"] == pytest.approx(logged["kl"], rel=1e-6)
        assert (metrics["kl"] > 0) == (shift > 0)
    for kind, count in {"chosen": num_chosen, "rejected": num_rejected}.items():
        for our_key, their_key in ((f"rewards_{kind}_mean", f"rewards/{kind}"), (f"logps_{kind}_mean", f"logps/{kind}")):
            assert (our_key in metrics) == (their_key in logged) == (count > 0)
            if count:
                assert metrics[our_key] == pytest.approx(logged[their_key], rel=1e-5)

    (our_gradient,) = torch.autograd.grad(sums["loss_sum"] / rows, policy, retain_graph=True)
    (their_gradient,) = torch.autograd.grad(theirs, policy)
    assert their_gradient.abs().max() > 0
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-8)
