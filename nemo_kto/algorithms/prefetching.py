"""Batches that a thread prepares while the device computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetching(Iterator[Item], Generic[Item]):
    """Iterator whose next item a thread prepares from :meth:`begin_next` on.

    The items and their order are those of the iterable, and errors are raised where the item would be returned. At the end
    of a ``with`` block no item is being prepared any more.
    """

    def __init__(
        self, *, items: Iterable[Item], waiting: Callable[[], AbstractContextManager[object]], in_thread: bool
    ) -> None:
        """Iterate over ``items``.

        Args:
            waiting: returns a context in which the caller waits for an item.
            in_thread: False to prepare each item when it is asked for.
        """
        self._items, self._waiting, self._in_thread = iter(items), waiting, in_thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")  # started by the first call of submit
        self._coming: Future[list[Item]] | None = None

    def begin_next(self) -> None:
        """Begin to prepare the next item."""
        if self._in_thread:
            self._coming = self._coming or self._thread.submit(self._take)

    def _take(self) -> list[Item]:
        return [*islice(self._items, 1)]  # empty at the end

    def __next__(self) -> Item:
        coming, self._coming = self._coming, None
        with self._waiting():
            taken = self._take() if coming is None else coming.result()
        if not taken:
            raise StopIteration
        return taken[0]

    def __enter__(self) -> Prefetching[Item]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)
