"""Losses of pairs against closed forms in double precision, their minima, and their metrics against brute force."""

from __future__ import annotations

import doctest
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from annotated_types import Ge, Gt, Lt

from nemo_kto.losses import preference
from nemo_kto.losses.loss import mixture
from nemo_kto.losses.metrics import Metrics
from nemo_kto.losses.preference import LOSSES as ALL_LOSSES
from nemo_kto.losses.preference import preference_metric_sums, preference_metrics

BETA = 0.3
OPTIONS = {
    "label_smoothing": 0.2,
    "simpo_gamma": 0.7,
    "orpo_sft_weight": 0.6,
    "gt_reward_scale": 1.5,
    "exo_label_smoothing": 0.1,
    "discopop_tau": 0.5,
    "cpo_alpha": 0.6,
    "alphapo_alpha": 0.5,
}
CHOSEN = [-0.4, -2.0, -0.1, -3.0, -1.0]  # log-probs, so that every loss can take them; log-ratios may be such too
REJECTED = [-1.9, -0.3, -4.0, -3.0, -0.9]
DELTAS = [2.0, -1.0, 0.5, 0.0, 3.0]  # reward of the chosen answer minus that of the rejected one


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logistic(x: float, smoothing: float = 0.0) -> float:
    return -(1 - smoothing) * math.log(sigmoid(x)) - smoothing * math.log(sigmoid(-x))


def bernoulli_kl(a: float, b: float) -> float:
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


def blend(x: float, share: float) -> float:
    return (1 - share) * logistic(x) + share * math.exp(-x)


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


def alpha_reward(logp: float, alpha: float) -> float:
    return (1 - math.exp(logp) ** -alpha) / alpha


# name -> (chosen, rejected, reward delta) -> loss, each written as its paper has it
FORMULAS: dict[str, Callable[[float, float, float], float]] = {
    "dpo": lambda c, r, d: logistic(BETA * (c - r), 0.2),
    "ipo": lambda c, r, d: (c - r - 1 / (2 * BETA)) ** 2,
    "hinge": lambda c, r, d: max(0.0, 1 - BETA * (c - r)),
    "robust": lambda c, r, d: (0.8 * logistic(BETA * (c - r)) - 0.2 * logistic(-BETA * (c - r))) / 0.6,
    "exo_pair": lambda c, r, d: bernoulli_kl(sigmoid(BETA * (c - r)), 0.9),
    "nca_pair": lambda c, r, d: logistic(BETA * c) + (logistic(-BETA * c) + logistic(-BETA * r)) / 2,
    "bco_pair": lambda c, r, d: logistic(BETA * c) + logistic(-BETA * r),
    "sppo_hard": lambda c, r, d: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, d: 1 - sigmoid(BETA * c) + sigmoid(BETA * r),
    "apo_down": lambda c, r, d: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r)),
    "discopop": lambda c, r, d: blend(BETA * (c - r), sigmoid(BETA * (c - r) / 0.5)),
    "rpo_sq": lambda c, r, d: (BETA * (c - r) - 1.5 * d) ** 2,
    "rpo_bwd_kl": lambda c, r, d: bernoulli_kl(sigmoid(1.5 * d), sigmoid(BETA * (c - r))),
    "rpo_fwd_kl": lambda c, r, d: bernoulli_kl(sigmoid(BETA * (c - r)), sigmoid(1.5 * d)),
    "simpo": lambda c, r, d: logistic(BETA * (c - r) - 0.7, 0.2),
    "orpo": lambda c, r, d: -0.6 * c + BETA * logistic(math.log(odds(c) / odds(r))),
    "sigmoid_norm": lambda c, r, d: logistic(BETA * (c - r), 0.2),
    "cpo": lambda c, r, d: logistic(BETA * (c - r), 0.2) - 0.6 * c,
    "cpo_simpo": lambda c, r, d: logistic(BETA * (c - r) - 0.7, 0.2) - 0.6 * c,
    "alphapo": lambda c, r, d: logistic(BETA * (alpha_reward(c, 0.5) - alpha_reward(r, 0.5)) - 0.7, 0.2),
}
# divergence -> f'(u) of u = pi / pi_ref, as in table 1 of the paper, whose alpha is 1 minus ours
DIVERGENCES: dict[str, Callable[[float], float]] = {
    "reverse_kl": lambda u: math.log(u) + 1,
    "forward_kl": lambda u: -1 / u,
    "js_divergence": lambda u: math.log(2 * u / (1 + u)),
    "alpha_divergence": lambda u: (1 - u**-0.7) / 0.7,
}
SORTED = {name for name, loss in ALL_LOSSES.items() if loss.sorts}  # a loss of theirs is none of one pair: test_aot.py
LOSSES = {name: loss for name, loss in ALL_LOSSES.items() if name not in SORTED}
WITH_REWARDS = [name for name in LOSSES if LOSSES[name].needs_rewards]


def loss_of(name: str, deltas: torch.Tensor | None = None, **options: float | str) -> Callable[..., torch.Tensor]:
    """The loss with all that it takes besides the two answers; one reward delta for all pairs where none are given."""
    loss = LOSSES[name]
    arguments: dict[str, Any] = {"beta": BETA, **{key: OPTIONS[key] for key in loss.options if key in OPTIONS}, **options}
    if loss.needs_rewards:
        arguments["reward_delta_P"] = torch.tensor(2.0) if deltas is None else deltas
    return partial(loss.function, **arguments)


def test_docstring_examples() -> None:
    result = doctest.testmod(preference)
    assert result.failed == 0
    assert result.attempted > 0


def test_the_name_table() -> None:
    assert LOSSES.keys() == FORMULAS.keys()
    smoothing, scale = ("label_smoothing", 0.0, (Ge(0), Lt(0.5))), ("gt_reward_scale", 1.0, (Gt(0),))
    gamma, sft = ("simpo_gamma", 0.5, (Ge(0),)), ("cpo_alpha", 1.0, (Ge(0),))
    divergence = [("f_divergence_type", "reverse_kl", tuple(DIVERGENCES)[1:]), ("f_alpha_divergence_coef", 0.5, ())]
    options = {
        name: [(key, option.default, get_args(option.annotation)[1:]) for key, option in loss.options.items()]
        for name, loss in LOSSES.items()
        if loss.options
    }
    assert options == {
        "dpo": [smoothing, *divergence],
        "ipo": divergence,
        "hinge": divergence,
        "robust": [smoothing, *divergence],
        "exo_pair": [("exo_label_smoothing", 1e-3, (Gt(0), Lt(0.5))), *divergence],
        "discopop": [("discopop_tau", 0.05, (Gt(0),)), *divergence],
        "rpo_sq": [scale],
        "rpo_bwd_kl": [scale],
        "rpo_fwd_kl": [scale],
        "simpo": [gamma, smoothing],
        "orpo": [("orpo_sft_weight", 1.0, (Ge(0),))],
        "sigmoid_norm": [smoothing, *divergence],
        "cpo": [sft, smoothing],
        "cpo_simpo": [gamma, sft, smoothing],
        "alphapo": [("alphapo_alpha", 0.25, ()), gamma, smoothing],
    }
    without_reference = [name for name, loss in LOSSES.items() if not loss.needs_reference]
    assert without_reference == ["simpo", "orpo", "cpo", "cpo_simpo", "alphapo"]
    means = [name for name, loss in LOSSES.items() if loss.average_log_probs]
    assert means == ["simpo", "orpo", "sigmoid_norm", "cpo_simpo", "alphapo"]
    assert not any(loss.needs_z0 for loss in LOSSES.values())
    assert WITH_REWARDS == ["rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"]


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_equals_its_closed_form(name: str) -> None:
    expected = [FORMULAS[name](*pair) for pair in zip(CHOSEN, REJECTED, DELTAS, strict=True)]
    losses = loss_of(name, torch.tensor(DELTAS))(torch.tensor(CHOSEN), torch.tensor(REJECTED))
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=2e-6, atol=1e-7)


DIVERGING = [name for name, loss in LOSSES.items() if "f_divergence_type" in loss.options]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", DIVERGING)
def test_a_divergence_replaces_the_log_ratios_by_its_scores(name: str, divergence: str) -> None:
    score = DIVERGENCES[divergence]
    scores = [[score(math.exp(r)) for r in side] for side in (CHOSEN, REJECTED)]
    expected = [FORMULAS[name](*pair) for pair in zip(*scores, DELTAS, strict=True)]
    loss = loss_of(name, f_divergence_type=divergence, f_alpha_divergence_coef=0.3)
    torch.testing.assert_close(
        loss(torch.tensor(CHOSEN), torch.tensor(REJECTED)), torch.tensor(expected), rtol=2e-5, atol=1e-6
    )
    chosen, rejected = (torch.tensor(side, dtype=torch.float64, requires_grad=True) for side in (CHOSEN, REJECTED))
    assert torch.autograd.gradcheck(loss, (chosen, rejected))


def test_limits_of_divergences_and_of_alphapo() -> None:
    """An alpha of 1 is the reverse divergence, 0 the forward one; AlphaPO with 0 is SimPO. None overflows."""
    pair = torch.tensor(CHOSEN), torch.tensor(REJECTED)
    for alpha, other in ((1.0, "reverse_kl"), (0.0, "forward_kl")):
        found = loss_of("dpo", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=alpha)(*pair)
        assert torch.equal(found, loss_of("dpo", f_divergence_type=other)(*pair))
    assert torch.equal(loss_of("alphapo", alphapo_alpha=0.0)(*pair), loss_of("simpo")(*pair))
    far = torch.full((1,), -1e3, requires_grad=True)
    for divergence in DIVERGENCES:
        losses = loss_of("dpo", f_divergence_type=divergence)(far, 2 * far)
        assert losses.isfinite().all()
        assert torch.autograd.grad(losses.sum(), far)[0].isfinite().all()


def test_a_mixture_is_the_weighted_sum_with_the_needs_of_its_parts() -> None:
    weights = {"dpo": 0.8, "bco_pair": 0.2, "exo_pair": 0.5}
    mixed = mixture({name: (ALL_LOSSES[name], weight) for name, weight in weights.items()})
    assert mixed.inputs == {"beta"}
    assert mixed.options == {**ALL_LOSSES["dpo"].options, **ALL_LOSSES["exo_pair"].options}
    assert mixed.part_metrics == ("dpo_loss", "bco_pair_loss", "exo_pair_loss")
    assert list(mixed.terms) == list(weights)
    loss = partial(mixed.function, beta=BETA, label_smoothing=0.2, exo_label_smoothing=0.1)
    expected = [
        sum(w * FORMULAS[name](c, r, 0.0) for name, w in weights.items()) for c, r in zip(CHOSEN, REJECTED, strict=True)
    ]
    torch.testing.assert_close(loss(torch.tensor(CHOSEN), torch.tensor(REJECTED)), torch.tensor(expected))
    chosen, rejected = (torch.tensor(side, dtype=torch.float64, requires_grad=True) for side in (CHOSEN, REJECTED))
    assert torch.autograd.gradcheck(loss, (chosen, rejected))
    parts = {name: (ALL_LOSSES[name], 1.0) for name in ("aot", "rpo_sq")}
    assert (mixture(parts).sorts, mixture(parts).needs_rewards, mixture(parts).looks_ahead) == ("margins", True, True)
    parts = {name: (ALL_LOSSES[name], 1.0) for name in ("simpo", "orpo")}
    assert (mixture(parts).needs_reference, mixture(parts).average_log_probs) == (False, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dpo", math.log(2)),
        ("ipo", 1 / (2 * BETA) ** 2),
        ("hinge", 1.0),
        ("robust", math.log(2)),
        ("exo_pair", bernoulli_kl(0.5, 0.9)),
        ("nca_pair", 2 * math.log(2)),
        ("bco_pair", 2 * math.log(2)),
        ("sppo_hard", 2 / (2 * BETA) ** 2),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("discopop", (math.log(2) + 1) / 2),
        ("rpo_sq", 9.0),
        ("rpo_bwd_kl", bernoulli_kl(sigmoid(3.0), 0.5)),
        ("rpo_fwd_kl", bernoulli_kl(0.5, sigmoid(3.0))),
    ],
)
def test_losses_at_policy_equal_to_reference(name: str, expected: float) -> None:
    losses = loss_of(name)(torch.zeros(3), torch.zeros(3))
    torch.testing.assert_close(losses, torch.full((3,), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_single_pairs_and_no_pairs(name: str) -> None:
    chosen, rejected, deltas = torch.tensor(CHOSEN), torch.tensor(REJECTED), torch.tensor(DELTAS)
    together = loss_of(name, deltas)(chosen, rejected)
    alone = [loss_of(name, d[None])(c[None], r[None]) for c, r, d in zip(chosen, rejected, deltas, strict=True)]
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-6, atol=1e-7)
    nothing = loss_of(name, deltas[:0])(chosen[:0], rejected[:0])
    assert nothing.shape == (0,)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_in_float64(name: str) -> None:
    # away from the hinge's edge, where there is no gradient
    chosen, rejected = (torch.tensor(side, dtype=torch.float64, requires_grad=True) for side in (CHOSEN, REJECTED))
    deltas = torch.tensor(DELTAS, dtype=torch.float64)
    assert torch.autograd.gradcheck(loss_of(name, deltas), (chosen, rejected))


# with separate targets for chosen and rejected answers
ANCHORED = ["nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "orpo", "cpo", "cpo_simpo", "alphapo"]


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ANCHORED])
def test_losses_depend_only_on_the_difference(name: str) -> None:
    chosen, rejected = torch.tensor(CHOSEN, requires_grad=True), torch.tensor(REJECTED, requires_grad=True)
    loss = loss_of(name, torch.tensor(DELTAS))
    torch.testing.assert_close(loss(chosen + 8, rejected + 8), loss(chosen, rejected), rtol=1e-5, atol=1e-6)
    loss(chosen, rejected).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    torch.testing.assert_close(chosen.grad, -rejected.grad, rtol=1e-6, atol=0)


def test_gradient_of_dpo_equals_the_closed_form() -> None:
    """Rafailov et al., section 4: the weight of a pair is beta sigmoid(rejected reward - chosen reward)."""
    chosen, rejected = torch.tensor(CHOSEN, requires_grad=True), torch.tensor(REJECTED)
    loss_of("dpo", label_smoothing=0.0)(chosen, rejected).sum().backward()
    expected = [-BETA * sigmoid(BETA * (r - c)) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    torch.testing.assert_close(chosen.grad, torch.tensor(expected), rtol=1e-6, atol=0)


# name -> (further arguments, the difference at the minimum, the loss at the minimum)
MINIMA: dict[str, tuple[dict[str, Any], float, float]] = {
    "dpo": ({}, math.log(4) / BETA, logistic(math.log(4), 0.2)),  # sigmoid(beta h) = 1 - e
    "ipo": ({}, 1 / (2 * BETA), 0.0),
    "exo_pair": ({}, math.log(9) / BETA, 0.0),
    "rpo_sq": ({}, 1.5 * 2.0 / BETA, 0.0),
    "rpo_bwd_kl": ({}, 1.5 * 2.0 / BETA, 0.0),
    "rpo_fwd_kl": ({}, 1.5 * 2.0 / BETA, 0.0),
    "simpo": ({}, (math.log(4) + 0.7) / BETA, logistic(math.log(4), 0.2)),
}


@pytest.mark.parametrize("name", MINIMA)
def test_minimum_of_each_loss(name: str) -> None:
    options, best, least = MINIMA[name]
    chosen = torch.tensor([best, best - 1, best + 1, best - 20, best + 20], dtype=torch.float64, requires_grad=True)
    losses = loss_of(name, torch.tensor(2.0, dtype=torch.float64), **options)(chosen, torch.zeros_like(chosen))
    assert losses[0].item() == pytest.approx(least, abs=1e-12)
    assert (losses[1:3] > losses[0]).all()
    assert (losses[3:] > losses[1:3]).all()
    losses.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad[0].item() == pytest.approx(0, abs=1e-12)
    assert chosen.grad[1:].sign().tolist() == [-1, 1, -1, 1]


@pytest.mark.parametrize("name", ["dpo", "hinge", "robust", "bco_pair", "apo_zero", "discopop", "simpo", "orpo"])
def test_a_better_answer_lowers_the_loss(name: str) -> None:
    options: dict[str, Any] = {"label_smoothing": 0.0} if "label_smoothing" in LOSSES[name].options else {}
    better, middle = torch.linspace(-4, -0.5, 8), torch.full((8,), -2.0)
    assert (loss_of(name, **options)(better, middle).diff() < 0).all()
    assert (loss_of(name, **options)(middle, better).diff() > 0).all()


def test_robust_dpo_is_unbiased() -> None:
    """Over pairs of which a fifth is flipped its mean is DPO's loss without label smoothing (arXiv 2403.00409)."""
    chosen, rejected = torch.tensor(CHOSEN, dtype=torch.float64), torch.tensor(REJECTED, dtype=torch.float64)
    robust = loss_of("robust", label_smoothing=0.2)
    mean = 0.8 * robust(chosen, rejected) + 0.2 * robust(rejected, chosen)
    torch.testing.assert_close(mean, loss_of("dpo", label_smoothing=0.0)(chosen, rejected), rtol=1e-12, atol=0)
    assert (robust(torch.tensor([30.0]), torch.zeros(1)) < 0).all()


def test_minimum_of_anchored_losses() -> None:
    """NCA holds sigmoid of the chosen reward at 2/3, SPPO both log-ratios at 1 / (2 beta) from the reference."""
    for name, chosen_at, rejected_at in [
        ("nca_pair", math.log(2) / BETA, None),
        ("sppo_hard", 1 / (2 * BETA), -1 / (2 * BETA)),
    ]:
        chosen = torch.tensor([chosen_at], dtype=torch.float64, requires_grad=True)
        rejected = torch.tensor([rejected_at or 0.0], dtype=torch.float64, requires_grad=True)
        loss_of(name)(chosen, rejected).sum().backward()
        assert chosen.grad is not None
        assert rejected.grad is not None
        assert chosen.grad.item() == pytest.approx(0, abs=1e-12)
        assert rejected.grad.item() == pytest.approx(0 if rejected_at is not None else BETA / 4, abs=1e-12)


def test_forward_and_backward_divergences_differ() -> None:
    """The first mean is over the rewards' preference, the second over the policy's: they differ, and swap with the sides."""
    h, d = torch.tensor([4.0]), torch.tensor([0.5])
    backward = loss_of("rpo_bwd_kl", d, gt_reward_scale=2.0, beta=0.25)(h, torch.zeros(1))
    forward = loss_of("rpo_fwd_kl", d, gt_reward_scale=2.0, beta=0.25)(h, torch.zeros(1))
    torch.testing.assert_close(backward, torch.zeros(1))  # 0.25 * 4 = 2 * 0.5
    torch.testing.assert_close(forward, torch.zeros(1))
    one, other = torch.tensor([3.0]), torch.tensor([-1.0])
    unscaled = {"beta": 1.0, "gt_reward_scale": 1.0}
    backward = loss_of("rpo_bwd_kl", one, **unscaled)(other, torch.zeros(1))
    torch.testing.assert_close(backward, loss_of("rpo_fwd_kl", other, **unscaled)(one, torch.zeros(1)))
    assert backward.item() != pytest.approx(loss_of("rpo_fwd_kl", one, **unscaled)(other, torch.zeros(1)).item(), rel=0.05)


FINITE = ["dpo", "hinge", "exo_pair", "nca_pair", "bco_pair", "apo_zero", "apo_down", "discopop"]


@pytest.mark.parametrize("name", [*FINITE, "rpo_bwd_kl", "rpo_fwd_kl", "simpo"])
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_extreme_log_ratios_stay_finite(name: str, size: float) -> None:
    chosen = torch.tensor([size, -size, size, -size], requires_grad=True)
    losses = loss_of(name)(chosen, torch.tensor([0.0, 0.0, size, -size]))
    losses.sum().backward()
    assert chosen.grad is not None
    assert losses.isfinite().all()
    assert (losses >= 0).all()
    assert chosen.grad.isfinite().all()


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_a_small_loss_is_accurate(name: str) -> None:
    """log(sigmoid(x)) in fp32 is 0 from x = 17 on."""
    options: dict[str, Any] = {"beta": 1.0, **dict.fromkeys(LOSSES[name].options.keys() & OPTIONS.keys(), 0.0)}
    losses = loss_of(name, **options)(torch.tensor([20.0, 40.0]), torch.zeros(2))
    torch.testing.assert_close(losses, torch.tensor([math.exp(-20.0), math.exp(-40.0)]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("distance", [1e-6, 1e-4, 1e-2, 1.0, 20.0, 100.0, 1e4])
def test_odds_are_accurate_at_extreme_probabilities(distance: float) -> None:
    """1 - p, with p rounded to fp32, would have one digit left at a log-prob of -1e-6."""
    logps = torch.tensor([-distance, -1.0])
    exact = logps.double()
    log_odds = exact - torch.log(-torch.expm1(exact))
    expected = -0.6 * exact[0] - BETA * torch.nn.functional.logsigmoid(log_odds[0] - log_odds[1])
    losses = loss_of("orpo")(logps[:1], logps[1:])
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-5, atol=1e-12)


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    chosen, rejected = torch.tensor([0.0, -1.0, 0.0], requires_grad=True), torch.tensor([-1.0, 0.0, 0.0], requires_grad=True)
    losses = loss_of("orpo")(chosen, rejected)
    losses.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert losses.isfinite().all()
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()
    assert losses[2].item() == pytest.approx(BETA * math.log(2))
    assert losses[0] < losses[2] < losses[1]


Sides = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def sums_of(chosen: torch.Tensor, rejected: torch.Tensor, *logps_and_valid: torch.Tensor) -> dict[str, float]:
    """Sums of pairs that learn from twice their DPO loss and a tenth of their SFT loss."""
    chosen_logps, rejected_logps, valid = logps_and_valid
    preference_losses = LOSSES["dpo"].function(chosen, rejected, beta=BETA)
    sums = preference_metric_sums(
        weighted_preference_losses_P=2 * preference_losses,
        weighted_sft_losses_P=-0.1 * chosen_logps,
        sft_scale=1.0,
        sft_counts_P=torch.ones_like(valid),
        preference_losses_P=preference_losses,
        sft_losses_P=-chosen_logps,
        chosen_logratios_P=chosen,
        rejected_logratios_P=rejected,
        chosen_logps_P=chosen_logps,
        rejected_logps_P=rejected_logps,
        valid_P=valid,
        beta=BETA,
    )
    return {name: value.item() for name, value in sums.items()}


@pytest.fixture
def batch() -> Sides:
    torch.manual_seed(0)
    valid = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1]).bool()
    return 4 * torch.randn(9), 4 * torch.randn(9), -torch.rand(9) * 50, -torch.rand(9) * 50, valid


def test_every_metric_by_brute_force(batch: Sides) -> None:
    rows = [pair[:4] for pair in zip(*(values.tolist() for values in batch), strict=True) if pair[4]]
    preference_losses = [logistic(BETA * (c - r)) for c, r, _, _ in rows]
    chosen, rejected = [BETA * c for c, *_ in rows], [BETA * r for _, r, *_ in rows]
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    expected = {
        "loss": statistics.fmean(2 * p - 0.1 * logp for p, (_, _, logp, _) in zip(preference_losses, rows, strict=True)),
        "preference_loss": statistics.fmean(preference_losses),
        "sft_loss": -statistics.fmean(logp for _, _, logp, _ in rows),
        "acc": statistics.fmean(margin > 0 for margin in margins),
        "rewards_chosen_mean": statistics.fmean(chosen),
        "rewards_rejected_mean": statistics.fmean(rejected),
        "rewards_margin": statistics.fmean(margins),
        "rewards_margin_std": statistics.stdev(margins),
        "rewards_all_mean": statistics.fmean(chosen + rejected),
        "rewards_all_std": statistics.stdev(chosen + rejected),
        "logps_chosen_mean": statistics.fmean(logp for _, _, logp, _ in rows),
        "logps_rejected_mean": statistics.fmean(logp for *_, logp in rows),
        "rows": 7,
        "invalid_rows": 2,
    }
    assert 0 < expected["acc"] < 1
    assert preference_metrics(sums_of(*batch)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("split", [[9], [1] * 9, [2, 7], [4, 4, 1], [0, 9], [3, 0, 6]])
def test_any_split_gives_the_same_metrics(batch: Sides, split: list[int]) -> None:
    parts = zip(*(values.split(split) for values in batch), strict=True)
    first, *others = [Metrics(sums_of(*part), preference_metrics) for part in parts]
    assert sum(others, first) == pytest.approx(Metrics(sums_of(*batch), preference_metrics), rel=1e-6)


def test_one_mean_over_the_tokens_of_several_batches() -> None:
    """An SFT term that is divided by tokens: two batches of 3 and of 1 pairs, with 8 and with 2 tokens."""

    def batch_metrics(sft: list[float], tokens: list[int]) -> Metrics:
        sft_losses, counts = torch.tensor(sft), torch.tensor(tokens)
        values: dict[str, Any] = dict.fromkeys(
            ("chosen_logratios_P", "rejected_logratios_P", "chosen_logps_P", "rejected_logps_P"), sft_losses
        )
        sums = preference_metric_sums(
            weighted_preference_losses_P=torch.ones_like(sft_losses),
            weighted_sft_losses_P=0.5 * sft_losses,
            sft_scale=len(sft) / sum(tokens),
            sft_counts_P=counts,
            preference_losses_P=torch.ones_like(sft_losses),
            sft_losses_P=sft_losses,
            valid_P=torch.ones(len(sft), dtype=torch.bool),
            beta=BETA,
            **values,
        )
        assert sums["loss_sum"] / len(sft) == pytest.approx(1 + 0.5 * sum(sft) / sum(tokens))
        return Metrics({name: value.item() for name, value in sums.items()}, preference_metrics)

    together = batch_metrics([4.0, 2.0, 6.0], [3, 1, 4]) + batch_metrics([8.0], [2])
    assert together["sft_loss"] == pytest.approx(20 / 10)
    assert together["loss"] == pytest.approx(1 + 0.5 * 20 / 10)


def test_values_of_invalid_pairs_are_ignored(batch: Sides) -> None:
    *values, valid = batch
    subset = sums_of(*(tensor[valid] for tensor in values), valid[valid])
    for spoiler in (float("nan"), float("inf")):
        spoilt = [torch.where(valid, tensor, spoiler) for tensor in values]
        assert sums_of(*spoilt, valid) == pytest.approx(subset | {"invalid_rows": 2}, rel=1e-6)


def test_only_the_loss_of_valid_pairs_has_a_gradient() -> None:
    chosen, rejected = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    losses = LOSSES["dpo"].function(chosen, rejected, beta=BETA)
    sums = preference_metric_sums(
        weighted_preference_losses_P=losses,
        weighted_sft_losses_P=-0 * chosen,
        sft_scale=1.0,
        sft_counts_P=torch.ones(3),
        preference_losses_P=losses,
        sft_losses_P=-chosen,
        chosen_logratios_P=chosen,
        rejected_logratios_P=rejected,
        chosen_logps_P=chosen,
        rejected_logps_P=rejected,
        valid_P=torch.tensor([True, False, True]),
        beta=BETA,
    )
    assert [name for name, value in sums.items() if value.requires_grad] == ["loss_sum"]
    kinds = {name: value.dtype for name, value in sums.items()}
    assert kinds.pop("loss_sum") == torch.float32
    assert {name for name, kind in kinds.items() if kind == torch.int64} == {"rows", "invalid_rows", "correct"}
    assert {kind for name, kind in kinds.items() if name.endswith("_sum")} == {torch.float64}
    sums["loss_sum"].backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([-BETA / 2, 0.0, -BETA / 2]))
    torch.testing.assert_close(rejected.grad, torch.tensor([BETA / 2, 0.0, BETA / 2]))


def test_equal_rewards_do_not_count_as_correct() -> None:
    chosen, rejected, valid = torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([1.0, 1.0, 4.0, 0.0]), torch.ones(4).bool()
    assert preference_metrics(sums_of(chosen, rejected, chosen, rejected, valid))["acc"] == 0.25
    # a policy that equals its reference up to the rounding of log-probs, and a pair whose answers differ
    chosen, rejected = torch.tensor([3e-5, 0.0, 3e-5, 1e-3]), torch.tensor([-3e-5, -3e-5, 1e-5, 0.0])
    logps = torch.full((4,), -150.0)
    assert preference_metrics(sums_of(chosen, rejected, logps, logps, valid))["acc"] == 0.25


def test_statistics_of_one_pair_and_of_none() -> None:
    one, two, valid = torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([True])
    got = preference_metrics(sums_of(one, two, one, two, valid))
    assert "rewards_margin_std" not in got
    assert got["rewards_all_std"] == pytest.approx(BETA * math.sqrt(2))
    two_pairs = preference_metrics(sums_of(*[torch.tensor([1.0, 3.0]), torch.zeros(2)] * 2, torch.ones(2).bool()))
    assert two_pairs["rewards_margin_std"] == pytest.approx(BETA * math.sqrt(2))
    nothing = preference_metrics(sums_of(one, two, one, two, ~valid))
    assert nothing == {"loss": 0.0, "rows": 0, "invalid_rows": 1}
    assert preference_metrics(sums_of(*[torch.zeros(0)] * 4, valid[:0])) == {"loss": 0.0, "rows": 0, "invalid_rows": 0}


def test_sums_of_many_pairs_are_accurate() -> None:
    rows = torch.tensor([2.0**24, 1.0, 1.0])  # in fp32 2**24 + 1 is 2**24
    sums = sums_of(rows, rows, rows, rows, torch.ones(3).bool())
    assert sums["logps_chosen_sum"] == sums["logps_rejected_sum"] == -sums["sft_loss_sum"] == 2**24 + 2
    assert sums["rewards_chosen_sum"] == sums["rewards_rejected_sum"] == BETA * (2**24 + 2)
