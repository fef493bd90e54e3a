"""Recipe of DPO and its variants: preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_kto.algorithms.recipes.recipe import SHARED_METRICS, LossConfig, Recipe
from nemo_kto.losses.loss import Loss
from nemo_kto.losses.preference import INPUTS, LOSSES, OPTIONAL_INPUTS

if TYPE_CHECKING:
    from nemo_kto.algorithms.dpo import DPOTrainer
    from nemo_kto.data.batches.collate import DPOBatch
    from nemo_kto.data.batches.dataset import DPODataset, DPOExample, Splits
    from nemo_kto.data.batches.loader import DPOCosts, SequenceCost
    from nemo_kto.data.inspect.preview import Preview
    from nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel


class DPOLossConfig(LossConfig):
    """Configuration section model.dpo."""

    sft_token_mean: bool
    sft_completion_only: bool


class DPORecipe(Recipe):
    """Builder of the DPO-specific parts of a run."""

    def build_splits(self, source: Mapping[str, Any], options: Mapping[str, float]) -> Splits[DPODataset]:
        from nemo_kto.data.batches.dataset import DPODataset, build_splits
        from nemo_kto.data.tokens.cache import DPO_EXAMPLES

        rewards = options["default_chosen_reward"], options["default_rejected_reward"]
        return build_splits(kind=DPO_EXAMPLES, make=partial(DPODataset, default_rewards=rewards), **source)

    def collation(
        self, options: Mapping[str, Any], *, with_kl: bool
    ) -> tuple[Callable[..., Any], Callable[[Any], DPOBatch]]:
        from nemo_kto.data.batches.collate import dpo_custom_collate
        from nemo_kto.data.batches.loader import share

        return share, partial(dpo_custom_collate, **options)

    def costs(
        self,
        *,
        cost: SequenceCost,
        kl_cost: SequenceCost | None,
        reference_cost: SequenceCost,
        seq_length: int,
        share_prompts: bool,
    ) -> DPOCosts:
        from nemo_kto.data.batches.loader import DPOCosts

        shared = cost if share_prompts else None
        return DPOCosts(cost=cost, shared_cost=shared)

    def preview(
        self, show: Preview, dataset: DPODataset, batch: DPOBatch, examples: Sequence[DPOExample], loss: Loss
    ) -> Iterator[str]:
        return show.dpo(dataset, batch, with_rewards=loss.needs_rewards)

    def model_class(self) -> type[MegatronGPTDPOModel]:
        from nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel

        return MegatronGPTDPOModel

    def model_options(self, section: DPOLossConfig, examples: DPODataset) -> dict[str, bool]:
        return {"sft_token_mean": section.sft_token_mean, "sft_completion_only": section.sft_completion_only}

    def trainer(self, collate_fn: Callable[[Any], Any]) -> Callable[..., DPOTrainer]:
        from nemo_kto.algorithms.dpo import DPOTrainer

        return partial(DPOTrainer, collate_fn=collate_fn)


DPO = DPORecipe(
    name="dpo",
    title="Training of a GPT model on pairs: DPO, IPO, RPO, hinge, SimPO, ORPO",
    data="rows of prompt, chosen and rejected",
    page="docs/algorithms/dpo.md",
    losses=LOSSES,
    loss_inputs=INPUTS,
    optional_inputs=OPTIONAL_INPUTS,
    loss_section=DPOLossConfig,
    unit="pairs",
    data_defaults={"default_chosen_reward": 1.0, "default_rejected_reward": 0.0},
    metrics=(*SHARED_METRICS, "acc", "rewards_margin_std"),
)
