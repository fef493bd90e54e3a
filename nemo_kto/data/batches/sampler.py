"""Sampler that defines the order of the examples, in global batches, identically on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler


@dataclass(kw_only=True, eq=False)
class GlobalBatchSampler(Sampler[list[int]]):
    """Sampler that yields the indices of the examples of each global batch of an epoch; ValueError if none can be formed.

    The order depends only on seed and epoch. Every example occurs once per epoch, except that the incomplete last batch is
    dropped if ``drop_last`` is set. Iterating does not change the state, so that workers may prefetch; the trainer sets the
    start of an iteration with ``set_position``. If ``needs_kl_examples`` is set, a last batch with a single example is
    merged into the previous batch, because a KL example needs the response of another example.
    """

    num_examples: int
    global_batch_size: int  # over all ranks
    seed: int
    shuffle: bool  # new order in each epoch; otherwise the order of the dataset
    drop_last: bool  # the incomplete last batch: in training, but not in validation
    needs_kl_examples: bool = True

    def __post_init__(self) -> None:
        least, why = (2, " (each example is paired with the answer of another)") if self.needs_kl_examples else (1, "")
        if self.global_batch_size < least:
            raise ValueError(f"global_batch_size must be at least {least}{why}, got {self.global_batch_size}")
        needed = self.global_batch_size if self.drop_last else least
        if self.num_examples < needed:
            raise ValueError(
                f"the dataset must have at least {needed} rows for a global batch of {self.global_batch_size}, got "
                f"{self.num_examples}; {'lower global_batch_size or ' if self.drop_last else ''}add rows"
            )
        self._epoch = self._consumed = 0

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, independent of the position."""
        return len(self._ranges(0))

    def set_position(self, epoch: int, consumed_in_epoch: int) -> None:
        """Set the next iteration to start in ``epoch`` after the first ``consumed_in_epoch`` examples."""
        if epoch < 0 or not 0 <= consumed_in_epoch <= self.num_examples:
            raise ValueError(
                f"a position must have an epoch of at least 0 and 0 to {self.num_examples} examples consumed in it, got "
                f"epoch {epoch} and {consumed_in_epoch} examples; the data must be those the run was started with"
            )
        self._epoch, self._consumed = epoch, consumed_in_epoch

    def order_hash(self) -> str:
        """Return a hash of the order of the first epoch: another numpy release may give another order for the same seed."""
        return hashlib.sha256(self._order(0).astype("<i8").tobytes()).hexdigest()

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self._epoch)
        for start, stop in self._ranges(self._consumed):
            yield order[start:stop].tolist()

    def _order(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            return np.random.default_rng((self.seed, epoch)).permutation(self.num_examples)
        return np.arange(self.num_examples)

    def _ranges(self, first: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each batch within the order, starting at position ``first``."""
        size = self.global_batch_size
        ranges = [(start, min(start + size, self.num_examples)) for start in range(first, self.num_examples, size)]
        left_over = (self.num_examples - first) % size
        if left_over and self.drop_last:
            ranges.pop()
        elif left_over == 1 and self.needs_kl_examples and len(ranges) > 1:
            ranges[-2:] = [(ranges[-2][0], self.num_examples)]
        return ranges
