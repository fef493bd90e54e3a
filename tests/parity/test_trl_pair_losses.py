"""numerics.md, point 4, for pairs: TRL's own loss functions on random log-probs.

TRL 1.16 is called without a trainer. It has DPO, IPO and the hinge inside its DPO trainer's step, from logits on; the same
three, SimPO and label smoothing as a function of log-probs in its CPO trainer; the odds ratio in its ORPO trainer. It has no
RPO with the rewards of the rows: see tests/unit/losses/test_preference.py.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_kto.losses.loss import mixture
from nemo_kto.losses.preference import LOSSES, divergence_margins, preference_metric_sums, preference_metrics, rank_partners
from tests.helpers.trl_losses import ACCELERATOR, VOCABULARY, WIDTH, KnownLogits, answer_logps, random_tokens

dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is the reference implementation")
cpo_trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer", reason="TRL is the reference implementation")
orpo_trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer", reason="TRL is the reference implementation")
pytestmark = pytest.mark.parity

TRL_NAMES = {"dpo": "sigmoid", "cpo": "sigmoid", "cpo_simpo": "simpo", "alphapo": "simpo"}
OPTIONS = {  # of TRL's trainer, and ours
    "robust": ({"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "exo_pair": ({"label_smoothing": 0.1}, {"exo_label_smoothing": 0.1}),
    "discopop": ({"discopop_tau": 0.5}, {"discopop_tau": 0.5}),
    "aot": ({"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
}
PAIRS = 6


def answers(*, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of 64 pairs, mean ones over an answer's tokens; from near certain to very unlikely."""
    torch.manual_seed(0)
    chosen, rejected = -spread * torch.rand(64), -spread * torch.rand(64)
    return chosen.requires_grad_(), rejected.requires_grad_()


def metrics_of(losses: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, **logps: Any) -> dict:
    sums = preference_metric_sums(
        weighted_preference_losses_P=losses,
        weighted_sft_losses_P=torch.zeros_like(losses),
        sft_scale=1.0,
        sft_counts_P=torch.ones_like(losses),
        preference_losses_P=losses,
        sft_losses_P=-chosen,
        chosen_logratios_P=chosen,
        rejected_logratios_P=rejected,
        chosen_logps_P=logps.get("chosen_logps", chosen),
        rejected_logps_P=logps.get("rejected_logps", rejected),
        valid_P=torch.ones(len(losses), dtype=torch.bool),
        beta=beta,
    )
    return preference_metrics({name: value.item() for name, value in sums.items()})


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, *values: torch.Tensor) -> None:
    """The same losses, and the same gradients with respect to the values."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    our_gradients = torch.autograd.grad(ours.mean(), values, retain_graph=True)
    their_gradients = torch.autograd.grad(theirs.mean(), values, retain_graph=True)
    for our_gradient, their_gradient in zip(our_gradients, their_gradients, strict=True):
        assert their_gradient.abs().max() > 0
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {"label_smoothing": 0.0}),
        ("dpo", {"label_smoothing": 0.3}),
        ("cpo", {"label_smoothing": 0.3, "cpo_alpha": 0.0}),  # its SFT term is another one: see test_trl_pair_steps.py
        ("cpo_simpo", {"simpo_gamma": 1.4, "label_smoothing": 0.1, "cpo_alpha": 0.0}),
        ("alphapo", {"simpo_gamma": 1.4, "label_smoothing": 0.1, "alphapo_alpha": 0.25}),
        ("alphapo", {"simpo_gamma": 0.5, "label_smoothing": 0.0, "alphapo_alpha": -0.1}),
        ("ipo", {}),
        ("hinge", {}),
        ("simpo", {"simpo_gamma": 0.5, "label_smoothing": 0.0}),
        ("simpo", {"simpo_gamma": 1.4, "label_smoothing": 0.1}),
    ],
)
def test_a_function_of_two_log_probs(name: str, options: dict[str, float], beta: float) -> None:
    chosen, rejected = answers(spread=12.0)
    named = {"label_smoothing": 0.0, "simpo_gamma": 0.0, **options}
    alpha = named.pop("alphapo_alpha", 0.0)
    trainer = SimpleNamespace(alpha=alpha, loss_type=TRL_NAMES.get(name, name), beta=beta, accelerator=ACCELERATOR, **named)
    theirs, chosen_rewards, rejected_rewards = cpo_trainer.CPOTrainer.cpo_loss(trainer, chosen, rejected)
    ours = LOSSES[name].function(chosen, rejected, beta=beta, **options)
    assert_same(ours, theirs, chosen, rejected)
    assert {each for each in LOSSES[name].options if not each.startswith("f_")} == set(options)
    if alpha:  # TRL logs the transformed rewards
        return

    metrics = metrics_of(ours, chosen, rejected, beta=beta)
    assert metrics["rewards_chosen_mean"] == pytest.approx(chosen_rewards.mean().item(), rel=1e-6)
    assert metrics["rewards_rejected_mean"] == pytest.approx(rejected_rewards.mean().item(), rel=1e-6)


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("spread", [0.02, 2.0, 20.0])
def test_the_odds_ratio(beta: float, spread: float) -> None:
    chosen, rejected = answers(spread=spread)
    trainer = SimpleNamespace(beta=beta, accelerator=ACCELERATOR)
    ratio_terms, *_ = orpo_trainer.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
    # its SFT term is another one: see test_trl_pair_steps.py
    assert_same(LOSSES["orpo"].function(chosen, rejected, beta=beta, orpo_sft_weight=0.0), -ratio_terms, chosen, rejected)
    assert_same(LOSSES["orpo"].function(chosen, rejected, beta=beta), -chosen - ratio_terms, chosen, rejected)


def logits_and_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(policy [2P, S, V], reference [2P, S, V], tokens [2P, S], mask [2P, S]); answers of different lengths, padded."""
    torch.manual_seed(1)
    policy, reference = (2 * torch.randn(2 * PAIRS, WIDTH, VOCABULARY) for _ in range(2))
    return policy.requires_grad_(), reference, *random_tokens(2 * PAIRS)


NOT_IN_DPO_TRAINER = ("rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl", "simpo", "orpo", "cpo", "cpo_simpo", "alphapo")


def trl_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    **settings: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of TRL's DPOTrainer, and its metrics."""
    trainer = SimpleNamespace(
        model=KnownLogits(policy).eval(),
        ref_model=KnownLogits(reference).eval(),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False, discopop_tau=discopop_tau),
        beta=beta,
        label_smoothing=label_smoothing,
        precompute_ref_logps=False,
        aux_loss_enabled=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        **{"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "ld_alpha": None, "use_weighting": False}
        | {"loss_types": ["sigmoid"], "loss_weights": [1.0]}
        | settings,
    )
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask}
    loss = dpo_trainer.DPOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)
    return loss, {key: values[0] for key, values in trainer._metrics["eval"].items()}


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in NOT_IN_DPO_TRAINER])
def test_from_logits_to_loss_gradient_and_metrics(name: str, beta: float) -> None:
    policy, reference, tokens, mask = logits_and_tokens()
    trl_options, options = OPTIONS.get(name, ({}, {}))
    settings: dict[str, Any] = {"loss_types": [TRL_NAMES.get(name, name)], **trl_options}
    theirs, logged = trl_loss(policy, reference, tokens, mask, beta=beta, **settings)

    average = name in ("ipo", "sigmoid_norm")  # TRL always takes means for them
    logps, reference_logps = (answer_logps(logits, tokens, mask, average=average) for logits in (policy, reference))
    chosen, rejected = (logps - reference_logps).chunk(2)
    compared, partners = (chosen, rejected), {}
    if LOSSES[name].sorts == "margins":
        (of_chosen, of_rejected), (held_chosen, held_rejected) = logps.chunk(2), reference_logps.chunk(2)
        compared = of_chosen - of_rejected, held_chosen - held_rejected
    if LOSSES[name].sorts:
        partners = dict(zip(("first_partners_P", "second_partners_P"), rank_partners(*compared), strict=True))
    ours = LOSSES[name].function(*compared, beta=beta, **partners, **options)
    assert_same(ours.mean(), theirs, policy)

    summed = answer_logps(policy, tokens, mask)
    chosen_logps, rejected_logps = summed.chunk(2)
    chosen, rejected = (summed - answer_logps(reference, tokens, mask)).chunk(2)
    metrics = metrics_of(ours, chosen, rejected, beta=beta, chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    assert metrics["loss"] == pytest.approx(theirs.item(), rel=1e-6)
    for key, trl_key in {
        "rewards_chosen_mean": "rewards/chosen",
        "rewards_rejected_mean": "rewards/rejected",
        "rewards_margin": "rewards/margins",
        "acc": "rewards/accuracies",
        "logps_chosen_mean": "logps/chosen",
        "logps_rejected_mean": "logps/rejected",
    }.items():
        assert metrics[key] == pytest.approx(logged[trl_key], rel=1e-5, abs=1e-6), key
    assert 0 < metrics["acc"] < 1


@pytest.mark.parametrize("name", ["dpo", "hinge", "robust", "exo_pair", "discopop"])
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergences(name: str, divergence: str) -> None:
    policy, reference, tokens, mask = logits_and_tokens()
    policy, reference = (
        (0.1 * policy).detach().requires_grad_(),
        0.1 * reference,
    )  # TRL does not bound the forward divergence
    trl_options, options = OPTIONS.get(name, ({}, {}))
    settings: dict[str, Any] = {"f_divergence_type": divergence, "f_alpha_divergence_coef": 0.3}
    of_trl = {"loss_types": [TRL_NAMES.get(name, name)], **trl_options, **settings}
    theirs, _ = trl_loss(policy, reference, tokens, mask, beta=0.5, **of_trl)
    chosen, rejected = (answer_logps(policy, tokens, mask) - answer_logps(reference, tokens, mask)).chunk(2)
    assert_same(LOSSES[name].function(chosen, rejected, beta=0.5, **settings, **options).mean(), theirs, policy)


@pytest.mark.parametrize("name", ["ipo", "sigmoid_norm"])
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergences_of_means(name: str, divergence: str) -> None:
    """u is the exponential of the mean log-ratio; TRL divides f' of the exponential of the sum by the number of tokens."""
    policy, reference, tokens, mask = logits_and_tokens()
    policy, reference = (0.1 * policy).detach().requires_grad_(), 0.1 * reference
    settings: dict[str, Any] = {"f_divergence_type": divergence, "f_alpha_divergence_coef": 0.3}
    theirs, _ = trl_loss(policy, reference, tokens, mask, beta=0.5, loss_types=[name], **settings)
    summed, means = (
        answer_logps(policy, tokens, mask, average=average) - answer_logps(reference, tokens, mask, average=average)
        for average in (False, True)
    )
    scores, of_means = (divergence_margins(each, torch.zeros_like(each), divergence, 0.3) for each in (summed, means))  # type: ignore[arg-type]
    chosen, rejected = (scores / mask.sum(1)).chunk(2)
    assert_same(LOSSES[name].function(chosen, rejected, beta=0.5).mean(), theirs, policy)
    ours = LOSSES[name].function(*means.chunk(2), beta=0.5, **settings)
    chosen, rejected = of_means.chunk(2)
    assert_same(ours.mean(), LOSSES[name].function(chosen, rejected, beta=0.5).mean(), policy)
    assert abs(ours.mean().item() - theirs.item()) > 1e-4


def test_a_mixture() -> None:
    """MPO without its SFT loss; steps with it, with LD-DPO, and with the weights of WPO: test_trl_pair_steps.py."""
    policy, reference, tokens, mask = logits_and_tokens()
    of_trl: dict[str, Any] = {"loss_types": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]}
    theirs, _ = trl_loss(policy, reference, tokens, mask, beta=0.1, **of_trl)
    mixed = mixture({"dpo": (LOSSES["dpo"], 0.8), "bco_pair": (LOSSES["bco_pair"], 0.2)})
    chosen, rejected = (answer_logps(policy, tokens, mask) - answer_logps(reference, tokens, mask)).chunk(2)
    assert_same(mixed.function(chosen, rejected, beta=0.1).mean(), theirs, policy)
