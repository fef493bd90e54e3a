"""Recipe of KTO: unpaired (binary) feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_kto.algorithms.recipes.recipe import SHARED_METRICS, LossConfig, Pairs, Recipe, Weight
from nemo_kto.losses.kto import INPUTS, LOSSES, OPTIONAL_INPUTS
from nemo_kto.losses.loss import Loss

if TYPE_CHECKING:
    from nemo_kto.algorithms.kto import KTOTrainer
    from nemo_kto.data.batches.collate import KTOBatch
    from nemo_kto.data.batches.dataset import KTODataset, KTOExample, Splits
    from nemo_kto.data.batches.loader import KTOCosts, SequenceCost
    from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
    from nemo_kto.tools.inspect.data_preview import Preview


class KTOLossConfig(LossConfig):
    """Configuration section model.kto."""

    desirable_loss_weight: Weight
    undesirable_loss_weight: Weight
    auto_balance: bool
    not_both_zero: ClassVar[Pairs] = (*LossConfig.not_both_zero, ("desirable_loss_weight", "undesirable_loss_weight"))


class KTORecipe(Recipe):
    """Builder of the KTO-specific parts of a run."""

    def build_splits(self, source: Mapping[str, Any], options: Mapping[str, float]) -> Splits[KTODataset]:
        from nemo_kto.data.batches.dataset import KTODataset, build_splits
        from nemo_kto.data.tokens.cache import KTO_EXAMPLES

        return build_splits(kind=KTO_EXAMPLES, make=KTODataset, **source)

    def collation(
        self, options: Mapping[str, Any], *, with_kl: bool
    ) -> tuple[Callable[..., Any], Callable[[Any], KTOBatch]]:
        from nemo_kto.algorithms.kto import identity
        from nemo_kto.data.batches.collate import kto_custom_collate

        return partial(kto_custom_collate, **options, with_kl=with_kl), identity

    def costs(
        self,
        *,
        cost: SequenceCost,
        kl_cost: SequenceCost | None,
        reference_cost: SequenceCost,
        seq_length: int,
        share_prompts: bool,
    ) -> KTOCosts:
        from nemo_kto.data.batches.loader import KTOCosts

        shared = reference_cost if share_prompts else None
        return KTOCosts(cost=cost, kl_cost=kl_cost, shared_cost=shared, seq_length=seq_length)

    def preview(
        self, show: Preview, dataset: KTODataset, batch: KTOBatch, examples: Sequence[KTOExample], loss: Loss
    ) -> Iterator[str]:
        return show.kto(dataset, batch, examples)

    def model_class(self) -> type[MegatronGPTKTOModel]:
        from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel

        return MegatronGPTKTOModel

    def model_options(self, section: KTOLossConfig, examples: KTODataset) -> dict[str, float]:
        desirable, undesirable = loss_weights(section, examples)
        return {"desirable_loss_weight": desirable, "undesirable_loss_weight": undesirable}

    def warnings(self, section: KTOLossConfig, examples: KTODataset, *, lr: float) -> list[str]:
        from nemo_kto.tools.inspect.data_check import balance_warning, one_class_warning

        classes = examples.class_weights
        found = one_class_warning(*classes, lr), balance_warning(*classes, *loss_weights(section, examples))
        return list(filter(None, found))

    def start_lines(self, section: KTOLossConfig, examples: KTODataset) -> dict[str, str]:
        from nemo_kto.tools.inspect.data_check import balance_text

        text = balance_text(*examples.class_weights, *loss_weights(section, examples))
        return {"balance": f"{text}, set by model.kto.auto_balance" if section.auto_balance else text}

    def trainer(self, collate_fn: Callable[[Any], Any]) -> type[KTOTrainer]:
        from nemo_kto.algorithms.kto import KTOTrainer

        return KTOTrainer


def loss_weights(section: KTOLossConfig, examples: KTODataset) -> tuple[float, float]:
    """Return the loss weights of desirable and undesirable examples, balanced with ``auto_balance``."""
    from nemo_kto.tools.inspect.data_check import balanced_weights

    weights = section.desirable_loss_weight, section.undesirable_loss_weight
    return balanced_weights(*examples.class_weights, *weights) if section.auto_balance else weights


KTO = KTORecipe(
    name="kto",
    title="KTO training of a GPT model",
    data='rows of prompt, response and "chosen" or "rejected"',
    page="docs/algorithms/kto.md",
    losses=LOSSES,
    loss_inputs=INPUTS,
    optional_inputs=OPTIONAL_INPUTS,
    loss_section=KTOLossConfig,
    metrics=SHARED_METRICS,
    val_metrics=("auc",),
    anchors={"z0": "kl", "delta": "delta"},
    aliases={
        "desirable_weight": "model.kto.desirable_loss_weight",
        "undesirable_weight": "model.kto.undesirable_loss_weight",
    },
)
