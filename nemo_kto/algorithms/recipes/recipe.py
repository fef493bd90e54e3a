"""What belongs to one algorithm, and what the sections model.NAME of all algorithms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt
from pydantic import BaseModel

from nemo_kto.errors import ConfigError, UserError
from nemo_kto.losses.loss import Loss, find_loss
from nemo_kto.utils.fields import Name, Remedy, Section

if TYPE_CHECKING:  # the command line needs none of it, and it takes seconds to import
    from nemo_kto.algorithms.dpo import DPOTrainer
    from nemo_kto.data.batches.dataset import Splits
    from nemo_kto.data.batches.loader import SequenceCost
    from nemo_kto.data.inspect.preview import Preview
    from nemo_kto.models.engine.sequences import SequenceBatch
    from nemo_kto.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

Weight = Annotated[float, Ge(0)]
Pairs = tuple[tuple[str, str], ...]


class LossConfig(BaseModel):
    """model.NAME: the loss. The options of the losses are fields too, see ``launch.schema.config_type``."""

    model_config = Section.model_config
    record: ClassVar[Loss]  # what preference_loss names
    not_both_zero: ClassVar[Pairs] = (("preference_loss_weight", "sft_loss_weight"),)  # one of a pair at least must count

    preference_loss: Name
    ref_policy_kl_penalty: Annotated[float, Gt(0), Remedy("e.g. {key}=0.1")]
    preference_average_log_probs: bool
    preference_loss_weight: Weight
    sft_loss_weight: Weight
    sft_average_log_probs: bool
    log_prob_forward_micro_batch_size: Annotated[int, Ge(1)] | None

    def loss_options(self) -> dict[str, float]:
        """The options of the loss that were given; the others have the default of its function."""
        given = {name: getattr(self, name) for name in self.record.options}
        return {name: value for name, value in given.items() if value is not None}

    def rules(self, section: str) -> Iterator[ConfigError]:
        """The mistakes that concern several keys of this section, whose name is given."""
        for first, second in self.not_both_zero:
            if getattr(self, first) == getattr(self, second) == 0:
                text = f"and {section}.{second} must not both be 0, got 0.0 and 0.0; nothing would be learned"
                yield ConfigError(f"{section}.{first}", text, (f"{section}.{second}",))


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe(ABC):
    """One algorithm: its attributes are what the command line needs, its methods build what is its own of a run.

    Attributes:
        name: of the command, and of the sections trainer.NAME and model.NAME; conf/gpt_NAME.yaml is its configuration.
        title: what it does.
        data: what it learns from.
        page: its page in the documents.
        losses: the values of ``preference_loss`` that have a name.
        loss_inputs: what a loss function is given by keyword, besides its anchor, partners and ``reward_delta_P`` where it
            needs them.
        loss_section: model.NAME.
        unit: what one row is.
        data_defaults: keys of its own in model.data, which are floats, with their defaults; for losses that need rewards.
        metrics: what its losses report and checkpoints can be ranked by; val_ or train_ stands before it.
        anchors: what losses may measure rewards against (``Loss.anchor``), and the metric that reports it.
        aliases: what other trainers call keys of its own, with our names; see ``launch.migration``.
    """

    name: str
    title: str
    data: str
    page: str
    losses: Mapping[str, Loss]
    loss_inputs: frozenset[str]
    loss_section: type[LossConfig]
    unit: str = "rows"
    data_defaults: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...]
    anchors: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def config_name(self) -> str:
        """Name of the configuration file."""
        return f"gpt_{self.name}"

    @abstractmethod
    def build_splits(self, source: Mapping[str, Any], options: Mapping[str, float]) -> Splits[Any]:
        """The datasets of ``source``; ``options`` are the values of :attr:`data_defaults`."""

    @abstractmethod
    def collation(self, loss: Loss, options: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
        """What a loader makes of a global batch (``data.loader.build_dataloader``), and what makes a batch of that."""

    @abstractmethod
    def costs(
        self, *, cost: SequenceCost, kl_cost: SequenceCost | None, seq_length: int
    ) -> Callable[[Sequence[Any]], list[float]]:
        """What gives the work of each example of a global batch; see ``data.shares.KTOCosts``."""

    @abstractmethod
    def preview(self, show: Preview, dataset: Any, batch: Any, examples: Sequence[Any], loss: Loss) -> Iterator[str]:
        """The lines of ``nemo-kto data preview`` on a batch, which holds the first of the ``examples`` of a dataset."""

    @abstractmethod
    def sequences(self, batch: Any) -> tuple[SequenceBatch, ...]:
        """What the reference evaluates of a batch."""

    @abstractmethod
    def model(self, section: Any, examples: Any, *, lr: float) -> Callable[..., MegatronGPTModel]:
        """What makes the model of engine, reference, objective and phase; ``examples`` are those of the training."""

    @abstractmethod
    def trainer(self, collate_fn: Callable[[Any], Any]) -> Callable[..., DPOTrainer]:
        """What makes the trainer of the other arguments of DPOTrainer."""

    def find_loss(self, name: str) -> Loss:
        """The loss of a name or a path.

        Raises:
            UserError: there is none, or it does not fit the algorithm, or its annotations cannot be read.
        """
        loss = find_loss(name, self.losses)
        kinds = {"needs_z0": "z0" in self.anchors, "needs_delta": "delta" in self.anchors}
        kinds |= {"needs_rewards": bool(self.data_defaults), "sorts": self.unit == "pairs"}
        for need, has in kinds.items():
            if getattr(loss, need) and not has:
                raise UserError(f"must name a loss without {need}, which `nemo-kto {self.name}` cannot give, got {name}")
        needed = [*["z0"] * loss.needs_z0, *["delta"] * loss.needs_delta, *["reward_delta_P"] * loss.needs_rewards]
        partners = ["first_partners_P", "second_partners_P"] if loss.sorts else []
        given = {*self.loss_inputs, *needed, *partners}
        if loss.inputs != given:
            takes = f"must name a loss whose function takes {', '.join(sorted(given))} by keyword, got {name}"
            raise UserError(f"{takes}, which takes {', '.join(sorted(loss.inputs)) or 'none'}")
        try:
            _ = loss.options
        except (NameError, TypeError) as error:
            raise UserError(f"must name a loss whose annotations can be read, got {name}; {error}") from error
        return loss


SHARED_METRICS = (
    "loss", "preference_loss", "sft_loss", "rewards_margin", "rewards_chosen_mean", "rewards_rejected_mean",
    "rewards_all_mean", "rewards_all_std", "logps_chosen_mean", "logps_rejected_mean",
)  # fmt: skip
# Metrics that rank no checkpoint: the KL estimate before it is clamped, counts, and how evenly experts are chosen.
OTHER_METRICS = (
    "kl_unclamped", "rows", "invalid_rows", "same_prompt_pairs", "moe_aux_loss", "moe_largest_share", "moe_smallest_share",
)  # fmt: skip
