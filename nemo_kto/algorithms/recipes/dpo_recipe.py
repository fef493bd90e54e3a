"""Recipe of DPO and its variants: preference pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from nemo_kto.algorithms.recipes.recipe import SHARED_METRICS, Imported, LossConfig, Recipe
from nemo_kto.errors import ConfigError
from nemo_kto.losses.loss import Loss, mixture
from nemo_kto.losses.preference import INPUTS, LOSSES, OPTIONAL_INPUTS
from nemo_kto.utils.fields import Remedy, check, echo, one_of
from nemo_kto.utils.text import mixture_name


class DPOLossConfig(LossConfig):
    """Configuration section model.dpo."""

    preference_losses: (
        Annotated[
            dict[Annotated[str, one_of(tuple(LOSSES))], Annotated[float, Gt(0)]],
            check(bool, "name losses, each with a finite weight"),
            Remedy("e.g. {key}={{dpo: 0.8, bco_pair: 0.2}}"),
        ]
        | None
    )
    reference_free: bool
    ld_alpha: Annotated[Annotated[float, Ge(0), Le(1)] | None, Remedy("e.g. {key}=0.5")]
    use_weighting: bool
    sft_token_mean: bool
    sft_completion_only: bool

    @property
    def parts(self) -> Mapping[str, Loss]:
        """The losses of the run by name, of which there are several in a mixture."""
        if self.preference_losses is None:
            return {self.preference_loss: super().definition}
        return {name: LOSSES[name] for name in self.preference_losses}

    @property
    def definition(self) -> Loss:
        """The loss or the mixture, which takes no reference with ``reference_free``."""
        parts, weights = self.parts, self.preference_losses
        loss = mixture({name: (parts[name], weights[name]) for name in weights}) if weights else next(iter(parts.values()))
        return replace(loss, needs_reference=False) if self.reference_free and loss.sorts is None else loss

    @property
    def loss_name(self) -> str:
        return mixture_name(self.preference_losses) if self.preference_losses else self.preference_loss

    def collate_options(self) -> dict[str, Any]:
        return {"ld_alpha": self.ld_alpha}

    def model_options(self, examples: Any) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("sft_token_mean", "sft_completion_only", "use_weighting")}

    def rules(self, section: str) -> Iterator[ConfigError]:
        """See :meth:`LossConfig.rules`."""
        yield from super().rules(section)
        yield from self._mixture_errors(section)
        reads = (f"{section}.preference_loss", f"{section}.preference_losses")
        sorting = [name for name, loss in self.parts.items() if loss.sorts]
        without = [] if any(loss.needs_reference for loss in self.parts.values()) else [*self.parts]
        for key, names, reason in (
            ("use_weighting", sorting, "compares values of different pairs"),
            ("reference_free", sorting, "sorts log-ratios"),
            ("reference_free", without, "has no reference"),
        ):
            if getattr(self, key) and names:
                text = f"must be false with {names[0]}, which {reason}, got true; set it to false, or leave out {names[0]}"
                yield ConfigError(f"{section}.{key}", text, reads)
        options = self.loss_options()
        divergence = options.get("f_divergence_type")
        if self.reference_free and divergence in ("forward_kl", "alpha_divergence"):
            text = f"must be false with f_divergence_type={divergence}, whose powers of probabilities vanish, got true"
            reads_all = (f"{section}.f_divergence_type", *reads)
            yield ConfigError(f"{section}.reference_free", f"{text}; leave one out", reads_all)
        alpha = options.get("f_alpha_divergence_coef")
        if alpha is not None and options.get("f_divergence_type") != "alpha_divergence":
            text = f"must be null unless {section}.f_divergence_type=alpha_divergence, got {alpha}; set one or the other"
            yield ConfigError(f"{section}.f_alpha_divergence_coef", text, (f"{section}.f_divergence_type", *reads))

    def _mixture_errors(self, section: str) -> Iterator[ConfigError]:
        """Yield the requirements that contradict each other in a mixture, which evaluates its losses on the same values."""
        if self.preference_losses is None:
            return
        key = f"{section}.preference_losses"
        if self.preference_loss != next(iter(LOSSES)):  # the default
            text = f"must be left out with {key}, got {self.preference_loss}; name it there with its weight"
            yield ConfigError(f"{section}.preference_loss", text, (key,))
        losses = self.parts.items()
        sorts: dict[str, object] = {name: loss.sorts for name, loss in losses if loss.sorts}
        needs = [("sort only one kind of values", "sorting", sorts)]
        if not self.reference_free:
            constraint = f"all take a reference or none without {section}.reference_free=true"
            needs.append((constraint, "reference", {name: loss.needs_reference for name, loss in losses}))
        if not self.preference_average_log_probs:
            constraint = f"all take means over tokens or none without {section}.preference_average_log_probs=true"
            needs.append((constraint, "means", {name: loss.average_log_probs for name, loss in losses}))
        for constraint, what, values in needs:
            if len(set(values.values())) > 1:
                told = ", ".join(f"{name} ({what}: {echo(value)})" for name, value in values.items())
                yield ConfigError(key, f"must name losses that {constraint}, got {told}; leave some out")


DPO = Recipe(
    name="dpo",
    title="Training of a GPT model on pairs: DPO, IPO, RPO, hinge, SimPO, ORPO",
    data="rows of prompt, chosen and rejected",
    page="docs/algorithms/dpo.md",
    losses=LOSSES,
    loss_inputs=INPUTS,
    optional_inputs=OPTIONAL_INPUTS,
    loss_section=DPOLossConfig,
    example="examples/quickstart/pairs.csv",
    unit="pairs",
    data_defaults={"default_chosen_reward": 1.0, "default_rejected_reward": 0.0},
    metrics=(*SHARED_METRICS, "acc", "rewards_margin_std"),
    aliases={"loss_weights": "model.dpo.preference_losses"},
    dataset=Imported("nemo_kto.data.batches.dataset:DPODataset"),
    collate=Imported("nemo_kto.data.batches.collate:dpo_custom_collate"),
    costs=Imported("nemo_kto.data.batches.loader:DPOCosts.of"),
    sequences=Imported("nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model:MegatronGPTDPOModel.sequences"),
    model=Imported("nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model:MegatronGPTDPOModel"),
    trainer=Imported("nemo_kto.algorithms.dpo:DPOTrainer"),
)
