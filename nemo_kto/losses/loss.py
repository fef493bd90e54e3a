"""Definition of a loss: a function of tensors, its options, and its requirements on the data and the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_type_hints

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

    The keyword-only parameters of ``function`` that have a default are the options of the loss: keys of model.kto or
    model.dpo, whose types, constraints and defaults are defined only in the signature.

    Attributes:
        function: returns one loss per example (KTO) or pair (DPO).
            KTO: (log_ratios_N, desirable_N, *, beta, desirable_weight, undesirable_weight, options) -> [N].
            DPO: (chosen_logratios_P, rejected_logratios_P, *, beta, options) -> [P].
        needs_reference: ``function`` takes log-ratios; otherwise it takes log-probs under the policy in their place.
        needs_z0: ``function`` also takes ``z0``, the estimate of KL(policy || reference), which requires KL examples.
        needs_delta: ``function`` also takes ``delta``, the running mean of the rewards, which requires an additional
            forward pass of the policy over each global batch.
        average_log_probs: ``function`` always takes means over the tokens of a response.
        needs_rewards: ``function`` also takes ``reward_delta_P``, computed from the rewards in the data.
        sorts: the values that are sorted over the global batch, which requires an additional forward pass of the policy over
            it: "answers", the log-ratios of the chosen and of the rejected answers, or "margins", the margins of the pairs
            under policy and reference, which ``function`` then takes in place of the log-ratios. ``function`` also takes
            ``first_partners_P`` and ``second_partners_P`` (see ``losses.preference.rank_partners``).
    """

    function: Callable[..., Tensor]
    needs_reference: bool = True
    needs_z0: bool = False
    needs_delta: bool = False
    average_log_probs: bool = False
    needs_rewards: bool = False
    sorts: Literal["answers", "margins"] | None = None

    def __post_init__(self) -> None:
        if self.needs_z0 and self.needs_delta:
            raise ValueError("a loss must not need both z0 and delta: its rewards are measured against one of them")
        if self.sorts and not self.needs_reference:
            raise ValueError("a loss that sorts log-ratios must need a reference")
        if self.anchor and not self.needs_reference:
            what = {"z0": "an estimate of KL(policy || reference)", "delta": "a mean of beta (log pi - log pi_ref)"}
            raise ValueError(f"a loss with {self.anchor}, which is {what[self.anchor]}, must need a reference")

    @property
    def anchor(self) -> str | None:
        """Name of the argument of ``function`` that rewards are measured against; None if they are measured against zero."""
        return "z0" if self.needs_z0 else "delta" if self.needs_delta else None

    @property
    def looks_ahead(self) -> bool:
        """Whether training on a global batch requires a forward pass of the policy over it beforehand."""
        return self.needs_delta or self.sorts is not None

    @property
    def options(self) -> dict[str, Option]:
        """Type and default of each option, by name.

        Raises:
            NameError: an annotation of ``function`` refers to an undefined name.
        """
        given = {name: each for name, each in self._keywords().items() if each.default is not each.empty}
        # the annotations of tensors are not evaluated because importing torch takes seconds
        annotated = {name: each.annotation for name, each in given.items() if each.annotation is not each.empty}
        known = getattr(inspect.unwrap(self.function), "__globals__", {})
        hints = get_type_hints(SimpleNamespace(__annotations__=annotated), known, include_extras=True)
        return {name: Option(hints.get(name, type(each.default)), each.default) for name, each in given.items()}

    @property
    def inputs(self) -> set[str]:
        """Names of the required keyword-only parameters of ``function``: its inputs besides the two tensors."""
        return {name for name, parameter in self._keywords().items() if parameter.default is parameter.empty}

    def _keywords(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.function).parameters
        return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def find_loss(name: str, known: Mapping[str, Loss]) -> Loss:
    """Return the loss with the given name.

    Args:
        name: a key of ``known``, or the path ``package.module.NAME`` of a :class:`Loss`; the module may be in the working
            directory.
        known: built-in losses by name.

    Raises:
        UserError: no such loss exists.
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
        raise UserError(f"must name a Loss (nemo_kto.losses.loss), got {name}, which is a {type(loss).__name__}")
    return loss
