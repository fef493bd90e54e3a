"""Steps whose numbers are not finite: they are skipped on all ranks together, and a few in a row end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_kto.errors import UserError

logger = logging.getLogger(__name__)

_MAX_NAMED = 8  # rows and ranks in a message


@dataclass(kw_only=True, eq=False)
class SkippedSteps:
    """Counts skipped steps, says what was wrong with each, and ends the run when too many follow each other.

    Attributes:
        max_in_a_row: so many skipped steps in a row end the run; 1 ends it at the first.
        name_rows: where the examples with these numbers come from, such as "rows.jsonl:3"; None where that is not known.
        last_checkpoint: the newest checkpoint that is complete, in words; None where that is not known.
        speaks: this rank says what is skipped.
    """

    max_in_a_row: int = 1
    name_rows: Callable[[Sequence[int]], Sequence[str]] | None = None
    last_checkpoint: Callable[[], str] | None = None
    speaks: bool = True

    def __post_init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def applied(self) -> None:
        """A step was applied."""
        self.in_a_row = 0

    def skip(self, what: str, *, step: int, ranks: Sequence[int], examples: Sequence[int]) -> None:
        """A step was skipped.

        Args:
            what: is not finite, such as "the loss is nan".
            step: its number, from 1.
            ranks: whose own numbers were not finite; none where only those of all together are not.
            examples: numbers of the examples of its global batch.

        Raises:
            UserError: too many steps in a row were skipped; names the last of them.
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
        """The end of a message about numbers that are not finite: which checkpoint is good, and what to do."""
        known = "" if self.last_checkpoint is None else f"; last good checkpoint: {self.last_checkpoint()}"
        return f"{known}; lower model.optim.lr, or look at these rows"


def _some(items: Sequence[object], noun: str = "") -> str:
    """The first items in a sentence, and how many more there are."""
    named = ", ".join(str(item) for item in items[:_MAX_NAMED])
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return f"{noun}{'s' * (len(items) != 1)} {named}{more}" if noun else f"{named}{more}"
