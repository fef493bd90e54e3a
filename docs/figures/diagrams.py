"""Drawings: a LoRA layer, and the data flow of a KTO step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from docs.figures.style import GOOD, THIRD, arrow, box, canvas, save

if TYPE_CHECKING:
    from pathlib import Path


def lora() -> Path:
    """An adapted linear layer: the frozen weight, and the two trained factors beside it."""
    figure, axes = canvas(height=2.1)
    box(axes, (8, 14.5), (10, 6), "x")
    box(axes, (45, 22), (34, 8), "W: frozen, [out, in]\nbf16, no gradient, no optimizer state", filled=True)
    box(axes, (33, 7), (18, 8), "A: trained\n[rank, in]", colour=GOOD, filled=True)
    box(axes, (58, 7), (18, 8), "B: trained\n[out, rank], starts at 0", colour=GOOD, filled=True)
    box(axes, (83, 14.5), (6, 6), "+")
    box(axes, (95, 14.5), (7, 6), "y")
    arrow(axes, (13, 16), (28, 22))
    arrow(axes, (13, 13), (24, 7.5), colour=GOOD)
    arrow(axes, (42, 7), (49, 7), colour=GOOD)
    arrow(axes, (62, 22), (80, 16.5))
    arrow(axes, (67, 7.5), (80, 13), colour=GOOD)
    arrow(axes, (86, 14.5), (91.5, 14.5))
    axes.text(77, 7, "alpha / rank", color=GOOD, fontsize=8.5, ha="left")
    axes.text(50, 0.7, "the reference is the same model without this path", color=GOOD, fontsize=8.5, ha="center")
    return save(figure, "lora")


def kto_step() -> Path:
    """A KTO step: which part each data-parallel rank computes, and the two values that are reduced over all ranks."""
    figure, axes = canvas(height=4.9)
    box(axes, (26, 63.5), (46, 7), "global batch: prompts x, responses y, labels", filled=True)
    box(
        axes,
        (76, 63.5),
        (42, 7),
        "KL examples: the prompt of one example,\nthe response of another",
        colour=THIRD,
        filled=True,
    )
    arrow(axes, (49, 63.5), (55, 63.5), colour=THIRD)
    arrow(axes, (26, 60), (26, 56.5))
    arrow(axes, (76, 60), (76, 56.5), colour=THIRD)
    box(axes, (50, 54), (94, 5), "each data-parallel rank takes its share of both (here: a half)")
    for number, (outer, inner, middle) in enumerate(((14, 37, 25), (86, 63, 75))):
        arrow(axes, (outer, 51.5), (outer, 48))
        arrow(axes, (inner, 51.5), (inner, 48), colour=THIRD)
        box(axes, (outer, 43.5), (22, 9), f"rank {number}: reference,\nlog pi_ref of examples\n(no gradient)")
        box(axes, (inner, 43.5), (22, 9), f"rank {number}: both models,\nr of KL examples\n(no gradient)", colour=THIRD)
        arrow(axes, (inner, 39), (inner, 35.6), colour=THIRD)
        arrow(axes, (outer, 39), (outer, 26))
        arrow(axes, (inner, 29.6), (inner, 26), colour=THIRD)
        text = f"rank {number}: policy, forward and backward:\nsums of losses, metrics and gradients"
        box(axes, (middle, 21.7), (44, 8), text, colour=GOOD, filled=True)
        arrow(axes, (middle, 17.5), (middle, 13.6), colour=GOOD)
    box(axes, (50, 32.6), (54, 5.6), "z0 = max(0, sum of r / number), over all ranks", colour=THIRD, filled=True)
    box(axes, (50, 10.7), (70, 5.4), "gradients: summed over all ranks, divided by the number of examples", colour=GOOD)
    arrow(axes, (50, 7.9), (50, 5.4))
    box(axes, (50, 2.9), (34, 4.6), "clip, AdamW step, metrics")
    return save(figure, "kto-step")


FIGURES: dict[str, Callable[[], Path]] = {"lora": lora, "kto-step": kto_step}
