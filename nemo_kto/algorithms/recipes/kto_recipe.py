"""Recipe of KTO: unpaired (binary) feedback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from nemo_kto.algorithms.recipes.recipe import SHARED_METRICS, Imported, LossConfig, Pairs, Recipe, Weight
from nemo_kto.data.rows.labels import balance_text, balance_warning, balanced_weights, one_class_warning
from nemo_kto.losses.kto import INPUTS, LOSSES, OPTIONAL_INPUTS

if TYPE_CHECKING:
    from nemo_kto.data.batches.dataset import KTODataset


class KTOLossConfig(LossConfig):
    """Configuration section model.kto."""

    desirable_loss_weight: Weight
    undesirable_loss_weight: Weight
    auto_balance: bool
    not_both_zero: ClassVar[Pairs] = (*LossConfig.not_both_zero, ("desirable_loss_weight", "undesirable_loss_weight"))

    def loss_weights(self, examples: KTODataset) -> tuple[float, float]:
        """Return the loss weights of desirable and undesirable examples, balanced with ``auto_balance``."""
        weights = self.desirable_loss_weight, self.undesirable_loss_weight
        return balanced_weights(*examples.class_weights, *weights) if self.auto_balance else weights

    def collate_options(self) -> dict[str, Any]:
        return {"with_kl": self.definition.needs_z0}

    def model_options(self, examples: KTODataset) -> dict[str, Any]:
        desirable, undesirable = self.loss_weights(examples)
        return {"desirable_loss_weight": desirable, "undesirable_loss_weight": undesirable}

    def warnings(self, examples: KTODataset, *, lr: float) -> list[str]:
        classes = examples.class_weights
        found = one_class_warning(*classes, lr), balance_warning(*classes, *self.loss_weights(examples))
        return [*filter(None, found)]

    def start_lines(self, examples: KTODataset) -> dict[str, str]:
        text = balance_text(*examples.class_weights, *self.loss_weights(examples))
        return {"balance": f"{text}, set by model.kto.auto_balance" if self.auto_balance else text}


KTO = Recipe(
    name="kto",
    title="KTO training of a GPT model",
    data='rows of prompt, response and "chosen" or "rejected"',
    page="docs/algorithms/kto.md",
    losses=LOSSES,
    loss_inputs=INPUTS,
    optional_inputs=OPTIONAL_INPUTS,
    loss_section=KTOLossConfig,
    example="examples/quickstart/thumbs.csv fields=prompt:question,response:answer,label:thumb",
    metrics=SHARED_METRICS,
    val_metrics=("auc",),
    anchors={"z0": "kl", "delta": "delta"},
    aliases={
        "desirable_weight": "model.kto.desirable_loss_weight",
        "undesirable_weight": "model.kto.undesirable_loss_weight",
    },
    dataset=Imported("nemo_kto.data.batches.dataset:KTODataset"),
    collate=Imported("nemo_kto.data.batches.collate:kto_custom_collate"),
    costs=Imported("nemo_kto.data.batches.loader:KTOCosts.of"),
    sequences=Imported("nemo_kto.models.nlp.gpt.megatron_gpt_kto_model:MegatronGPTKTOModel.sequences"),
    model=Imported("nemo_kto.models.nlp.gpt.megatron_gpt_kto_model:MegatronGPTKTOModel"),
    trainer=Imported("nemo_kto.algorithms.kto:KTOTrainer"),
)
