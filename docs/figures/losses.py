"""Figures of the losses, drawn from the functions of ``nemo_kto.losses`` and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from docs.figures.style import BAD, FAINT, GOOD, INK, THIRD, legend, mark, panels, save
from nemo_kto.losses import kto, preference

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

BETA = 0.1
LossOfReward = Callable[[Tensor], Tensor]


def loss_and_slope(loss: LossOfReward, rewards_n: Tensor) -> tuple[Tensor, Tensor]:
    """A loss at rewards, and its derivative by the reward: [n] each."""
    rewards_n = rewards_n.clone().requires_grad_()
    losses_n = loss(rewards_n)
    (slopes_n,) = torch.autograd.grad(losses_n.sum(), rewards_n)
    return losses_n.detach(), slopes_n


def draw(axes: list[Axes], loss: LossOfReward, rewards_n: Tensor, *, colour: str, label: str, dashed: bool = False) -> None:
    """Draw a loss into the first axes, and the size of its slope into the second."""
    line = (0, (4, 2)) if dashed else "solid"
    losses_n, slopes_n = loss_and_slope(loss, rewards_n)
    axes[0].plot(rewards_n, losses_n, color=colour, label=label, linestyle=line)
    axes[1].plot(rewards_n, slopes_n.abs(), color=colour, label=label, linestyle=line)


def unpaired(name: str) -> Path:
    """The loss of a desirable and of an undesirable example against its reward, of KTO, BCO or APO-zero."""
    shift = {"kto": 1.0, "bco": 1.0, "apo_zero_unpaired": 0.0}[name]
    given = {"kto": {"z0": torch.tensor(shift / BETA)}, "bco": {"delta": torch.tensor(shift)}}.get(name, {})
    function = kto.LOSSES[name].function
    rewards_n = torch.linspace(-5, 7, 121)
    figure, axes = panels(2)
    for desirable, colour, label in ((1, GOOD, "desirable"), (0, BAD, "undesirable")):

        def loss(rewards: Tensor, desirable: int = desirable) -> Tensor:
            labels = torch.full_like(rewards, desirable)
            return function(rewards / BETA, labels, beta=BETA, desirable_weight=1.0, undesirable_weight=1.0, **given)

        draw(axes, loss, rewards_n, colour=colour, label=label, dashed=not desirable)
    centre = {"kto": "beta z0", "bco": "delta", "apo_zero_unpaired": ""}[name]
    for panel, title in zip(axes, ("loss", "weight of the example in the gradient"), strict=True):
        panel.set(title=title, xlabel="reward beta r of the example", ylim=(0, None))
        mark(panel, x=shift, text=centre)
    legend(figure, axes[0])
    return save(figure, name.replace("_", "-"))


def pair_loss(name: str, margin: Tensor, **options: float | Tensor) -> Tensor:
    """A loss for pairs that depends on beta h only, as a function of the margin beta h."""
    zeros = torch.zeros_like(margin)
    if "reward_delta_P" in options:
        options["reward_delta_P"] = torch.full_like(margin, float(options["reward_delta_P"]))
    beta = float(options.pop("beta", BETA))
    return preference.LOSSES[name].function(margin / beta, zeros, beta=beta, **options)


MARGINS = torch.linspace(-4, 6, 401)
DPO = ("DPO", partial(pair_loss, "dpo"))
# By figure: the curves, and where to put a mark.
OF_MARGIN: dict[str, tuple[list[tuple[str, LossOfReward]], list[tuple[float, str]]]] = {
    "dpo": (
        [DPO, ("label smoothing e = 0.1", partial(pair_loss, "dpo", label_smoothing=0.1))],
        [(2.197, "log (1 - e) / e")],
    ),
    "ipo": ([("IPO, beta = 0.5", partial(pair_loss, "ipo", beta=0.5)), DPO], [(0.5, "target 0.5")]),
    "hinge": ([("hinge", partial(pair_loss, "hinge")), DPO], [(1.0, "1")]),
    "rpo": (
        [
            ("rpo_bwd_kl", partial(pair_loss, "rpo_bwd_kl", reward_delta_P=2.0)),
            ("rpo_fwd_kl", partial(pair_loss, "rpo_fwd_kl", reward_delta_P=2.0)),
            ("rpo_sq", partial(pair_loss, "rpo_sq", reward_delta_P=2.0)),
        ],
        [(2.0, "eta d = 2")],
    ),
    "simpo": (
        [
            ("gamma = 0", partial(pair_loss, "simpo", simpo_gamma=0.0)),
            ("gamma = 1.5", partial(pair_loss, "simpo", simpo_gamma=1.5)),
        ],
        [(1.5, "gamma")],
    ),
    "pairs-margin": (
        [
            ("robust, e = 0.1", partial(pair_loss, "robust", label_smoothing=0.1)),
            ("exo_pair, e = 0.001", partial(pair_loss, "exo_pair")),
            ("discopop", partial(pair_loss, "discopop")),
            DPO,
        ],
        [],
    ),
}


def of_margin(name: str) -> Path:
    """Losses that depend only on the margin of a pair, with DPO dashed for comparison."""
    curves, marks = OF_MARGIN[name]
    figure, axes = panels(2)
    colours = iter((GOOD, BAD, THIRD))
    for label, loss in curves:
        is_dpo = label == "DPO" and name != "dpo"
        draw(axes, loss, MARGINS, colour=INK if is_dpo else next(colours), label=label, dashed=is_dpo)
    top = {"ipo": 5.0, "rpo": 5.0}.get(name)
    for panel, title in zip(axes, ("loss", "weight of the pair in the gradient"), strict=True):
        margin = "beta h (difference of mean log-probs)" if name == "simpo" else "reward margin beta h"
        panel.set(title=title, xlabel=margin, ylim=(0, top) if top else (min(0.0, panel.get_ylim()[0]), None))
        for x, text in marks:
            mark(panel, x=x, text=text)
    legend(figure, axes[0])
    return save(figure, name)


def orpo() -> Path:
    """ORPO against the likelihood of a token of the chosen answer, for three of the rejected answer."""
    figure, axes = panels(2)
    chosen_n = torch.linspace(0.05, 0.95, 91)
    for rejected, colour in ((0.2, GOOD), (0.5, THIRD), (0.8, BAD)):

        def term(weight: float, chosen: Tensor = chosen_n, rejected: float = rejected) -> Tensor:
            others = torch.full_like(chosen, rejected).log()
            return preference.orpo_losses(chosen.log(), others, beta=1.0, orpo_sft_weight=weight)

        label = f"rejected {rejected}"
        axes[0].plot(chosen_n, term(0.0), color=colour, label=label)
        axes[1].plot(chosen_n, term(1.0), color=colour, label=label)
    for panel, title in zip(axes, ("odds ratio term, before beta", "whole loss, beta = 1"), strict=True):
        panel.set(title=title, xlabel="mean likelihood of a token of the chosen answer", ylim=(0, 4))
    legend(figure, axes[0])
    return save(figure, "orpo")


TARGETS = {
    "nca_pair": "NCA",
    "bco_pair": "BCO",
    "sppo_hard": "SPPO",
    "apo_zero": "APO-zero",
    "apo_down": "APO-down",
    "dpo": "DPO",
}


def pair_targets() -> Path:
    """Where losses with a target for each answer move the two rewards of a pair: the negative gradient as arrows."""
    figure, axes = panels(3, 2, height=5.0)
    ticks_n = torch.linspace(-3, 3, 6)
    chosen, rejected = (grid.flatten() for grid in torch.meshgrid(ticks_n, ticks_n, indexing="xy"))
    for panel, (name, title) in zip(axes, TARGETS.items(), strict=True):
        # SPPO's targets are +-1/2 in units of beta r; a unit of beta gives each loss the same axes
        both = torch.stack([chosen, rejected]).requires_grad_()
        losses = preference.LOSSES[name].function(both[0], both[1], beta=1.0)
        (slopes,) = torch.autograd.grad(losses.sum(), both)
        sizes = slopes.norm(dim=0)
        shortened = -slopes / sizes.clamp(min=1e-9) * (sizes / sizes.max()).sqrt()
        panel.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
        panel.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
        arrows = panel.quiver(
            chosen,
            rejected,
            *shortened,
            color=GOOD,
            angles="xy",
            scale_units="xy",
            scale=1.3,
            width=0.01,
            headlength=4,
            headaxislength=4,
            pivot="mid",
            clip_on=False,
        )
        arrows.set_in_layout(False)
        panel.set(title=title, xlim=(-3.6, 3.6), ylim=(-3.6, 3.6), xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    for panel in axes[3:]:
        panel.set_xlabel("reward of the chosen answer")
    for panel in axes[::3]:
        panel.set_ylabel("of the rejected answer")
    return save(figure, "pairs-targets")


def aot() -> Path:
    """Which values of a batch AOT compares: pairs as they came, and after sorting."""
    draw_from = torch.Generator().manual_seed(3)
    chosen_n, rejected_n = torch.randn(2, 9, generator=draw_from) * 1.3 + torch.tensor([[0.6], [-0.3]])
    figure, axes = panels(2, height=2.0)
    for panel, order, title in (
        (axes[0], (torch.arange(9), torch.arange(9)), "DPO: each pair"),
        (axes[1], (chosen_n.argsort(), rejected_n.argsort()), "AOT: values of equal rank"),
    ):
        for upper, lower in zip(chosen_n[order[0]].tolist(), rejected_n[order[1]].tolist(), strict=True):
            panel.plot([upper, lower], [1, 0], color=INK if upper > lower else BAD, linewidth=1)
        panel.plot(chosen_n, torch.ones(9), "o", color=GOOD, markersize=5)
        panel.plot(rejected_n, torch.zeros(9), "o", color=BAD, markersize=5)
        panel.set(title=title, yticks=(0, 1), yticklabels=("rejected", "chosen"), xlabel="log-ratio", ylim=(-0.25, 1.25))
    return save(figure, "aot")


FIGURES: dict[str, Callable[[], Path]] = {
    **{name.replace("_", "-"): partial(unpaired, name) for name in ("kto", "bco", "apo_zero_unpaired")},
    **{name: partial(of_margin, name) for name in OF_MARGIN},
    "orpo": orpo,
    "pairs-targets": pair_targets,
    "aot": aot,
}
