"""What a split holds, in numbers, and what to say of it before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """The numbers of one split; of a blend, of one epoch of it.

    Attributes:
        rows: examples, or pairs.
        desirable: examples with a good answer; None for pairs.
        tokens: of prompts and answers, after truncation; the prompt of a pair counts once for each answer.
        cut_prompts: rows whose prompt lost tokens to truncation.
        cut_responses: rows whose answer, or one of whose two answers, did.
    """

    rows: int
    desirable: int | None
    tokens: int
    cut_prompts: int
    cut_responses: int

    @property
    def classes(self) -> dict[str, int]:
        """How many examples there are of each kind; empty for pairs."""
        return {} if self.desirable is None else {"desirable": self.desirable, "undesirable": self.rows - self.desirable}

    def warnings(self, split: str, *, seq_length: int) -> Iterator[str]:
        """What looks wrong with the split of this name."""
        if self.desirable is not None and self.desirable in (0, self.rows):
            label = "desirable" if self.desirable else "undesirable"
            yield f"{split}: all {self.rows} rows are {label}; is the file sorted by label?"
        for what, count in (("prompt", self.cut_prompts), ("answer", self.cut_responses)):
            if count:
                limit = f"longer than model.data.seq_length={seq_length}"
                yield f"{split}: the {what} is cut in {count} of {self.rows} rows, which are {limit}"
