"""Definition of a loss: a function of tensors, its options, and its requirements on the data and the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_type_hints

from nemo_kto.errors import UserError, either, import_object

if TYPE_CHECKING:
    from torch import Tensor


class Option(NamedTuple):
    """Option of a loss: its type, which may be Annotated with constraints, and its default."""

    annotation: object
    default: object


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Value of ``preference_loss``: a loss function and its requirements.

    The keyword-only parameters of ``function`` describe the loss. Those with a default are its options: keys of model.kto or
    model.dpo, whose types, constraints and defaults are defined only in the signature. Those without a default are its
    inputs, which the model passes. The function returns one loss per example (KTO) or pair (DPO):

        - KTO: ``(log_ratios_N, desirable_N, *, beta, desirable_weight, undesirable_weight, options) -> [N]``; also z0, the
          estimate of KL(policy || reference), or delta, the running mean of the rewards.
        - DPO: ``(chosen_logratios_P, rejected_logratios_P, *, beta, options) -> [P]``; also reward_delta_P, computed from
          the rewards in the data.

    ``sorts`` names values that are sorted over the global batch, which requires an additional forward pass of the policy
    over it: "answers", the log-ratios of the chosen and of the rejected answers, or "margins", the margins of the pairs
    under the policy and under the reference. The function then takes first_P and second_P, the two values of a pair, and for
    each the value of equal rank of the other kind, first_partners_P and second_partners_P.

    ``parts`` are the losses of a :func:`mixture`, by name, each with its weight. Raises ValueError if the requirements
    contradict each other.
    """

    function: Callable[..., Tensor]
    needs_reference: bool = True  # takes log-ratios; otherwise log-probs under the policy in their place
    average_log_probs: bool = False  # always takes means over the tokens of a response
    sorts: Literal["answers", "margins"] | None = None
    parts: Mapping[str, tuple[Loss, float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.needs_z0 and self.needs_delta:
            raise ValueError("a loss must not take both z0 and delta: its rewards are measured against one of them")
        partners = self.inputs & {"first_partners_P", "second_partners_P"}
        if len(partners) != (2 if self.sorts else 0):
            raise ValueError("a loss must have sorts exactly if its function takes first_partners_P and second_partners_P")
        if self.sorts and not self.needs_reference:
            raise ValueError("a loss that sorts log-ratios must take a reference (needs_reference=True)")
        if self.anchor and not self.needs_reference:
            meanings = {"z0": "an estimate of KL(policy || reference)", "delta": "a mean of beta (log pi - log pi_ref)"}
            raise ValueError(
                f"a loss that takes {self.anchor}, {meanings[self.anchor]}, must take a reference (needs_reference=True)"
            )

    @cached_property
    def _keywords(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.function).parameters
        return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Names of the required keyword-only parameters of ``function``."""
        return frozenset(name for name, parameter in self._keywords.items() if parameter.default is parameter.empty)

    @property
    def part_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that report the losses of a mixture."""
        return tuple(f"{name}_loss" for name in self.parts)

    def taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the keyword arguments that the function takes."""
        return {name: value for name, value in arguments.items() if name in self._keywords}

    @property
    def terms(self) -> Mapping[str, tuple[Loss, float]]:
        """The losses to evaluate, by name, each with its weight: the parts of a mixture, or this loss, without a name."""
        return self.parts or {"": (self, 1.0)}

    @property
    def needs_z0(self) -> bool:
        """Whether the batches must contain KL examples."""
        return "z0" in self.inputs

    @property
    def needs_delta(self) -> bool:
        return "delta" in self.inputs

    @property
    def needs_rewards(self) -> bool:
        return "reward_delta_P" in self.inputs

    @property
    def anchor(self) -> str | None:
        """Name of the input that rewards are measured against; None if they are measured against zero."""
        return "z0" if self.needs_z0 else "delta" if self.needs_delta else None

    @property
    def looks_ahead(self) -> bool:
        """Whether training on a global batch requires a forward pass of the policy over it beforehand."""
        return self.needs_delta or self.sorts is not None

    @cached_property
    def options(self) -> dict[str, Option]:
        """Type and default of each option, by name; NameError if an annotation refers to an undefined name.

        Pickled with the loss: a function of a notebook takes along what it calls, and not what its annotations name.
        """
        given = {name: each for name, each in self._keywords.items() if each.default is not each.empty}
        # the annotations of tensors are not evaluated because importing torch takes seconds
        annotated = {name: each.annotation for name, each in given.items() if each.annotation is not each.empty}
        known = getattr(inspect.unwrap(self.function), "__globals__", {})
        hints = get_type_hints(SimpleNamespace(__annotations__=annotated), known, include_extras=True)
        return {name: Option(hints.get(name, type(each.default)), each.default) for name, each in given.items()}


def mixture(parts: Mapping[str, tuple[Loss, float]]) -> Loss:
    """Return the weighted sum of losses for pairs, with the options and the requirements of all of them.

    Whether the requirements agree is not checked. The function is for parts that compare the same two values: with a part
    that sorts margins, the caller evaluates the :attr:`Loss.terms` one by one.
    """
    losses = [loss for loss, _ in parts.values()]
    parameters = {name: parameter for loss in losses for name, parameter in loss._keywords.items()}
    options = {name: option for loss in losses for name, option in loss.options.items()}

    def weighted_sum(first_P: Tensor, second_P: Tensor, **arguments: Any) -> Tensor:
        terms = [weight * loss.function(first_P, second_P, **loss.taken(arguments)) for loss, weight in parts.values()]
        return sum(terms[1:], start=terms[0])

    weighted_sum.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        # evaluated annotations, because the modules of the functions define their names
        [each.replace(annotation=options[name].annotation) if name in options else each for name, each in parameters.items()]
    )
    return Loss(
        function=weighted_sum,
        needs_reference=any(loss.needs_reference for loss in losses),
        average_log_probs=all(loss.average_log_probs for loss in losses),
        sorts=next((loss.sorts for loss in losses if loss.sorts), None),
        parts=parts,
    )


def find_loss(name: str, known: Mapping[str, Loss]) -> Loss:
    """Return the loss with the given name, a key of ``known`` or the path ``package.module.NAME`` of a :class:`Loss`.

    The module may be in the working directory. Raises UserError if there is no such loss.
    """
    if name in known:
        return known[name]
    if "." not in name:
        raise UserError(f"must be {either(list(known))}, got {name}")
    try:
        loss = import_object(name)
    except UserError as error:
        wanted = f"must be {either(list(known))}, or the path of a Loss"
        raise UserError(str(error).replace("must be a path", wanted)) from error
    if not isinstance(loss, Loss):
        raise UserError(f"must be a Loss (nemo_kto.losses.loss), got {name}, a {type(loss).__name__}")
    return loss
