"""Handling of steps with non-finite values: all ranks skip them, and too many consecutive ones end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_kto.errors import UserError

logger = logging.getLogger(__name__)

_MAX_NAMED = 8  # maximum number of rows, and of ranks, in a message


@dataclass(kw_only=True, eq=False)
class SkippedSteps:
    """Counter of skipped steps, which reports each of them and ends the run after too many consecutive ones.

    Attributes:
        max_in_a_row: number of consecutive skipped steps that ends the run; 1 ends it at the first.
        name_rows: return the source of the examples with the given indices, such as "rows.jsonl:3"; None if unknown.
        last_checkpoint: return a description of the newest complete checkpoint; None if unknown. All ranks call it.
        speaks: whether this rank logs skipped steps.
    """

    max_in_a_row: int = 1
    name_rows: Callable[[Sequence[int]], Sequence[str]] | None = None
    last_checkpoint: Callable[[], str] | None = None
    speaks: bool = True

    def __post_init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def applied(self) -> None:
        """Record an applied step."""
        self.in_a_row = 0

    def skip(self, what: str, *, step: int, ranks: Sequence[int], examples: Sequence[int]) -> None:
        """Record a skipped step.

        Args:
            what: the non-finite value, such as "the loss is nan".
            step: number of the step, from 1.
            ranks: ranks whose own values were not finite; empty if only the values reduced over all ranks are not.
            examples: indices of the examples of the global batch.

        Raises:
            UserError: too many consecutive steps were skipped; the message names the last of them.
        """
        self.total += 1
        self.in_a_row += 1
        text = f"step {step}: {what}"
        if ranks:
            text += f" on {_some(ranks, 'rank')}"
        if self.name_rows is not None:
            text += f"; rows of its global batch: {_some(self.name_rows(examples))}"
        if self.in_a_row < self.max_in_a_row:
            if self.speaks:
                logger.warning(f"{text}; the step is skipped, {self.in_a_row} in a row")
            return
        skipped = "1 step was" if self.in_a_row == 1 else f"{self.in_a_row} steps in a row were"
        raise UserError(f"{text}; {skipped} skipped (trainer.max_skipped_steps={self.max_in_a_row}){self.advice}")

    @property
    def advice(self) -> str:
        """End of a message about non-finite values: the last good checkpoint and what to do."""
        known = "" if self.last_checkpoint is None else f"; last good checkpoint: {self.last_checkpoint()}"
        return f"{known}; lower model.optim.lr, or look at these rows"


def _some(items: Sequence[object], noun: str = "") -> str:
    """Join the first items as text, followed by the number of omitted ones."""
    named = ", ".join(str(item) for item in items[:_MAX_NAMED])
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return f"{noun}{'s' * (len(items) != 1)} {named}{more}" if noun else f"{named}{more}"
