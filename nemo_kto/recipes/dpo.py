"""DPO and its variants: pairs of answers."""

from __future__ import annotations

from nemo_kto.losses.preference import LOSSES
from nemo_kto.recipes.recipe import SHARED_METRICS, LossConfig, Recipe


class DPOLossConfig(LossConfig):
    """model.dpo."""


DPO = Recipe(
    name="dpo",
    title="Training of a GPT model on pairs: DPO, IPO, RPO, hinge, SimPO, ORPO",
    data="jsonl rows of prompt, chosen and rejected",
    page="algorithms/dpo.md",
    losses=LOSSES,
    loss_inputs=frozenset({"beta"}),
    loss_section=DPOLossConfig,
    data_defaults={"default_chosen_reward": 1.0, "default_rejected_reward": 0.0},
    metrics=(*SHARED_METRICS, "acc", "rewards_margin_std"),
)
