"""KTO: unpaired (binary) feedback."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_kto.errors import ConfigError
from nemo_kto.losses.kto import LOSSES
from nemo_kto.recipes.recipe import SHARED_METRICS, LossConfig, Recipe, Weight


class KTOLossConfig(LossConfig):
    """model.kto."""

    desirable_loss_weight: Weight
    undesirable_loss_weight: Weight
    auto_balance: bool

    def rules(self, section: str) -> Iterator[ConfigError]:
        """The mistakes that concern several keys of this section."""
        yield from super().rules(section)
        yield from self.not_both_zero(f"{section}.desirable_loss_weight", f"{section}.undesirable_loss_weight")


KTO = Recipe(
    name="kto",
    title="KTO training of a GPT model",
    data='jsonl rows of prompt, response and "chosen" or "rejected"',
    page="algorithms/kto.md",
    losses=LOSSES,
    loss_inputs=frozenset({"beta", "desirable_weight", "undesirable_weight"}),
    loss_section=KTOLossConfig,
    metrics=SHARED_METRICS,
    z0_metrics=("kl",),
)
