"""The order of the rows: whole global batches, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields the row numbers of one global batch after the other, for one epoch.

    The order depends on seed and epoch alone. Every row comes once an epoch, but for the incomplete batch at the end
    where ``drop_last`` is set. Iterating changes no state, so that workers may read ahead: the trainer says where an
    iteration starts with ``set_position``.

    A last batch of one row would leave nobody to form a KL pair with; that row joins the batch before it.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        with_pairs: bool = True,
    ) -> None:
        """Set up epoch 0 from its first row.

        Args:
            num_rows: rows in the dataset.
            global_batch_size: rows in a batch, over all ranks.
            seed: of the order.
            shuffle: a new order each epoch; otherwise the order of the dataset.
            drop_last: leave out the incomplete batch at the end (training); otherwise it is used (validation).
            with_pairs: KL pairs are formed within each batch, so that none may have a single row.

        Raises:
            ValueError: no batch can be formed.
        """
        least = 2 if with_pairs else 1
        if global_batch_size < least:
            raise ValueError(
                f"global_batch_size must be at least {least}"
                f"{' (each row is paired with the answer of another row)' if with_pairs else ''}, got {global_batch_size}"
            )
        needed = global_batch_size if drop_last else least
        if num_rows < needed:
            raise ValueError(
                f"the dataset must have at least {needed} rows for a global batch of {global_batch_size}, got {num_rows}; "
                f"{'lower global_batch_size or ' if drop_last else ''}give it more rows"
            )
        self.num_rows = num_rows
        self.global_batch_size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._with_pairs = with_pairs
        self._epoch = 0
        self._consumed = 0

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever the position is."""
        return len(self._ranges(0))

    def set_position(self, epoch: int, consumed_in_epoch: int) -> None:
        """Let the next iteration start in ``epoch`` after ``consumed_in_epoch`` rows of it.

        Raises:
            ValueError: negative, or more rows than an epoch has.
        """
        if epoch < 0 or not 0 <= consumed_in_epoch <= self.num_rows:
            raise ValueError(
                f"a position must have an epoch of at least 0 and 0 to {self.num_rows} rows consumed in it, got epoch "
                f"{epoch} and {consumed_in_epoch} rows; the data must be those the run was started with"
            )
        self._epoch = epoch
        self._consumed = consumed_in_epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for start, stop in self._ranges(self._consumed):
            yield order[start:stop].tolist()

    def _order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng((self._seed, self._epoch)).permutation(self.num_rows)

    def _ranges(self, first: int) -> list[tuple[int, int]]:
        """(start, stop) of each batch within the order, from row ``first`` of it on."""
        size = self.global_batch_size
        ranges = [(start, min(start + size, self.num_rows)) for start in range(first, self.num_rows, size)]
        left_over = (self.num_rows - first) % size
        if left_over and self._drop_last:
            ranges.pop()
        elif left_over == 1 and self._with_pairs and len(ranges) > 1:
            ranges[-2:] = [(ranges[-2][0], self.num_rows)]
        return ranges
