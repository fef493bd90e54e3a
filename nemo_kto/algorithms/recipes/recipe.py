"""Description of an algorithm, and base class of its configuration section model.NAME."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt
from pydantic import BaseModel

from nemo_kto.errors import ConfigError, UserError
from nemo_kto.losses.loss import Loss, find_loss
from nemo_kto.utils.fields import MayChange, Name, Remedy, Section

if TYPE_CHECKING:
    from nemo_kto.data.batches.splits import Splits

Weight = Annotated[float, Ge(0)]
Pairs = tuple[tuple[str, str], ...]


class LossConfig(BaseModel):
    """Configuration section model.NAME: the loss.

    The options of the losses become further fields, see ``config.schema.config_type``.
    """

    model_config = Section.model_config
    losses: ClassVar[Mapping[str, Loss]]  # the built-in losses of the algorithm
    not_both_zero: ClassVar[Pairs] = (("preference_loss_weight", "sft_loss_weight"),)  # one of each pair must be above 0

    preference_loss: Name
    ref_policy_kl_penalty: Annotated[float, Gt(0), Remedy("e.g. {key}=0.1")]
    preference_average_log_probs: bool
    preference_loss_weight: Weight
    sft_loss_weight: Weight
    sft_average_log_probs: bool
    log_prob_forward_micro_batch_size: Annotated[Annotated[int, Ge(1)] | None, MayChange("speed and memory")]

    @property
    def definition(self) -> Loss:
        """The loss that ``preference_loss`` names."""
        return find_loss(self.preference_loss, self.losses)

    @property
    def loss_name(self) -> str:
        """Name of the loss in messages."""
        return self.preference_loss

    def collate_options(self) -> dict[str, Any]:
        """Return the arguments of the collate function that belong to the loss."""
        return {}

    def loss_options(self) -> dict[str, Any]:
        """Return the configured loss options; the others keep the defaults of the loss function."""
        given = {name: getattr(self, name) for name in self.definition.options}
        return {name: value for name, value in given.items() if value is not None}

    def model_options(self, examples: Any) -> dict[str, Any]:
        """Return the arguments of the model that belong to the loss; ``examples`` is the training dataset."""
        return {}

    def warnings(self, examples: Any, *, lr: float) -> list[str]:
        """Return warnings about settings that do not fit the training dataset."""
        return []

    def start_lines(self, examples: Any) -> dict[str, str]:
        """Return lines about the training dataset for the table at the start of a run."""
        return {}

    def rules(self, section: str) -> Iterator[ConfigError]:
        """Yield the errors that involve several keys of this section; ``section`` is its name."""
        for first, second in self.not_both_zero:
            if getattr(self, first) == getattr(self, second) == 0:
                text = f"and {section}.{second} must not both be 0, got 0.0 and 0.0; nothing would be learned"
                yield ConfigError(f"{section}.{first}", text, (f"{section}.{second}",))


@dataclass(frozen=True)
class Imported:
    """A callable named by its ``path``, "module:name" or "module:Class.name", which is imported when it is first used.

    The modules of a run take seconds to import, and a command line is checked without them.
    """

    path: str

    def load(self) -> Any:
        module, _, name = self.path.partition(":")
        return attrgetter(name)(importlib.import_module(module))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.load()(*arguments, **options)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """An algorithm, as the command line and the builder of a run need to know it."""

    name: str  # of the command and of the sections trainer.NAME and model.NAME; its configuration is conf/gpt_NAME.yaml
    title: str
    data: str
    page: str
    losses: Mapping[str, Loss]  # built-in losses, by value of ``preference_loss``
    loss_inputs: frozenset[str]  # names of the keyword arguments that every loss function must take
    optional_inputs: frozenset[str]  # names of those that are passed to the loss functions that take them
    loss_section: type[LossConfig]
    example: str  # data file in the repository, with the words that it needs on a command line
    unit: str = "rows"  # plural noun for the rows of the data
    # Algorithm-specific keys of model.data with their default values, for losses that need rewards.
    data_defaults: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...]  # of its losses, by which checkpoints can be ranked as val_METRIC or train_METRIC
    val_metrics: tuple[str, ...] = ()  # further metrics, which only validations report
    # Quantities against which losses may measure rewards (``Loss.anchor``), each with the metric that reports it.
    anchors: Mapping[str, str] = field(default_factory=dict)
    # Names that other trainers use for algorithm-specific keys, with our names; see ``config.migration``.
    aliases: Mapping[str, str] = field(default_factory=dict)
    dataset: Imported  # class of the examples, which takes ``data_defaults`` as further arguments
    # Collates the examples of this rank (the indices ``kept``) in a global batch; with ``with_kl`` the batch contains KL
    # examples, for a loss that needs z0.
    collate: Imported
    costs: Imported  # builds the ``data.batches.loader.ExampleCosts`` of the examples of a global batch
    sequences: Imported  # returns the sequences of a batch, see ``PreferenceModel.sequences``
    model: Imported
    trainer: Imported

    @property
    def config_name(self) -> str:
        """Name of the configuration file."""
        return f"gpt_{self.name}"

    @property
    def has_pairs(self) -> bool:
        """Whether an example is a pair of answers."""
        return self.unit == "pairs"

    def build_splits(self, source: Mapping[str, Any], options: Mapping[str, float]) -> Splits[Any]:
        """Build the datasets of ``source``; ``options`` holds the values of the keys in :attr:`data_defaults`."""
        from nemo_kto.data.batches.splits import build_splits

        dataset = self.dataset.load()
        return build_splits(kind=dataset.kind, make=partial(dataset, **options), **source)

    def find_loss(self, name: str) -> Loss:
        """Return the loss with the given name or import path.

        Raises UserError if there is no such loss, it does not fit the algorithm, or its annotations cannot be read.
        """
        loss = find_loss(name, self.losses)
        problems = []
        if missing := self.loss_inputs - loss.inputs:
            problems.append(f"which does not take {', '.join(sorted(missing))}")
        if foreign := loss.inputs - self.loss_inputs - self.optional_inputs:
            problems.append(f"which takes {', '.join(sorted(foreign))}, unknown to `nemo-kto {self.name}`")
        if problems:
            required, optional = (", ".join(sorted(names)) for names in (self.loss_inputs, self.optional_inputs))
            text = f"must be a loss whose function takes {required} by keyword, and optionally {optional}"
            raise UserError(f"{text}; got {name}, {' and '.join(problems)}")
        try:
            _ = loss.options
        except (NameError, TypeError) as error:
            raise UserError(f"must be a loss with readable annotations, got {name}; {error}") from error
        return loss


SHARED_METRICS = (
    "loss", "preference_loss", "sft_loss", "rewards_margin", "rewards_chosen_mean", "rewards_rejected_mean",
    "rewards_all_mean", "rewards_all_std", "logps_chosen_mean", "logps_rejected_mean",
)  # fmt: skip
LARGER_IS_BETTER = ("acc", "auc", "rewards_margin")
# Metrics that cannot rank checkpoints: the KL estimate before clamping, counts, the load balance of experts, weights.
OTHER_METRICS = (
    "kl_unclamped", "rows", "invalid_rows", "same_prompt_pairs", "moe_aux_loss", "moe_largest_share", "moe_smallest_share",
    "wpo_weight_mean",
)  # fmt: skip
