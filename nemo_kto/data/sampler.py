"""The order of the examples: whole global batches, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields the numbers of the examples of one global batch after the other, for one epoch.

    The order depends only on seed and epoch. Every example comes once an epoch, but for the incomplete batch at the end
    where ``drop_last`` is set. Iterating changes no state, so that workers may read ahead: the trainer says where an
    iteration starts with ``set_position``.

    A last batch of one example would leave none to form a KL example with; it joins the batch before it.
    """

    def __init__(
        self,
        *,
        num_examples: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        needs_kl_examples: bool = True,
    ) -> None:
        """Start at the first example of epoch 0.

        Args:
            num_examples: examples in the dataset.
            global_batch_size: examples in a batch, over all ranks.
            seed: of the order.
            shuffle: a new order each epoch; otherwise the order of the dataset.
            drop_last: leave out the incomplete batch at the end (training); otherwise it is used (validation).
            needs_kl_examples: KL examples are formed within each batch, so that none may have a single example.

        Raises:
            ValueError: no batch can be formed.
        """
        least = 2 if needs_kl_examples else 1
        if global_batch_size < least:
            raise ValueError(
                f"global_batch_size must be at least {least}"
                f"{' (each example is paired with the answer of another)' if needs_kl_examples else ''}, "
                f"got {global_batch_size}"
            )
        needed = global_batch_size if drop_last else least
        if num_examples < needed:
            raise ValueError(
                f"the dataset must have at least {needed} rows for a global batch of {global_batch_size}, "
                f"got {num_examples}; {'lower global_batch_size or ' if drop_last else ''}give it more rows"
            )
        self.num_examples = num_examples
        self.global_batch_size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._needs_kl_examples = needs_kl_examples
        self._epoch = 0
        self._consumed = 0

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever the position is."""
        return len(self._ranges(0))

    def set_position(self, epoch: int, consumed_in_epoch: int) -> None:
        """Let the next iteration start in ``epoch`` after ``consumed_in_epoch`` examples of it.

        Raises:
            ValueError: negative, or more examples than an epoch has.
        """
        if epoch < 0 or not 0 <= consumed_in_epoch <= self.num_examples:
            raise ValueError(
                f"a position must have an epoch of at least 0 and 0 to {self.num_examples} examples consumed in it, got "
                f"epoch {epoch} and {consumed_in_epoch} examples; the data must be those the run was started with"
            )
        self._epoch = epoch
        self._consumed = consumed_in_epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for start, stop in self._ranges(self._consumed):
            yield order[start:stop].tolist()

    def _order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_examples)
        return np.random.default_rng((self._seed, self._epoch)).permutation(self.num_examples)

    def _ranges(self, first: int) -> list[tuple[int, int]]:
        """(start, stop) of each batch within the order, from example ``first`` of it on."""
        size = self.global_batch_size
        ranges = [(start, min(start + size, self.num_examples)) for start in range(first, self.num_examples, size)]
        left_over = (self.num_examples - first) % size
        if left_over and self._drop_last:
            ranges.pop()
        elif left_over == 1 and self._needs_kl_examples and len(ranges) > 1:
            ranges[-2:] = [(ranges[-2][0], self.num_examples)]
        return ranges
