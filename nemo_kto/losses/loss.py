"""What a loss is: a function of tensors, its options, and what it needs from the data and from the reference."""

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
    """An option of a loss: its type, which may be Annotated with constraints, and its default."""

    annotation: object
    default: object


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A value of ``preference_loss``.

    The keyword-only parameters of ``function`` that have a default are the options of the loss: keys of model.kto or
    model.dpo, whose type, constraint and default stand in the signature and only there.

    Attributes:
        function: one loss for each example (KTO) or pair (DPO).
            KTO: (log_ratios_N, desirable_N, *, beta, desirable_weight, undesirable_weight, options) -> [N].
            DPO: (chosen_logratios_P, rejected_logratios_P, *, beta, options) -> [P].
        needs_reference: it takes log-ratios; without a reference it takes log-probs of the policy in their place.
        needs_z0: it also takes ``z0``, the estimate of KL(policy || reference), which needs KL examples.
        needs_delta: it also takes ``delta``, the running mean of the rewards, for which the policy evaluates each global
            batch once more, forward only.
        average_log_probs: it always takes means over the tokens of a response.
        needs_rewards: it also takes ``reward_delta_P``, from the rewards in the data.
        sorts: what it sorts over the global batch, for which the policy evaluates it once more, forward only: the log-ratios
            of chosen and of rejected "answers", or the "margins" of pairs under policy and reference, which the function
            then takes in the place of the log-ratios. It also takes ``first_partners_P`` and ``second_partners_P``
            (``losses.preference.rank_partners``).
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
        """What rewards are measured against, by the name that ``function`` takes it by; None for zero."""
        return "z0" if self.needs_z0 else "delta" if self.needs_delta else None

    @property
    def looks_ahead(self) -> bool:
        """Whether the policy evaluates each global batch, forward only, before it is trained on."""
        return self.needs_delta or self.sorts is not None

    @property
    def options(self) -> dict[str, Option]:
        """Name -> type and default of each option; NameError if an annotation of ``function`` names what does not exist."""
        given = {name: each for name, each in self._keywords().items() if each.default is not each.empty}
        # those of tensors stay unread: torch takes seconds to import
        annotated = {name: each.annotation for name, each in given.items() if each.annotation is not each.empty}
        known = getattr(inspect.unwrap(self.function), "__globals__", {})
        hints = get_type_hints(SimpleNamespace(__annotations__=annotated), known, include_extras=True)
        return {name: Option(hints.get(name, type(each.default)), each.default) for name, each in given.items()}

    @property
    def inputs(self) -> set[str]:
        """Names of what ``function`` must be given besides its two tensors: its keyword-only parameters without default."""
        return {name for name, parameter in self._keywords().items() if parameter.default is parameter.empty}

    def _keywords(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.function).parameters
        return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def find_loss(name: str, known: Mapping[str, Loss]) -> Loss:
    """The loss of a name.

    Args:
        name: a key of ``known``, or ``package.module.NAME`` of a :class:`Loss`, which may be in the working directory.
        known: the losses that have a name.

    Raises:
        UserError: there is no such loss.
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
