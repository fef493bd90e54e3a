"""Asynchronous copies between host and device: a non-blocking copy is visible after the host has waited for it.

Until then the page-locked memory that a copy writes to holds NaN, and the memory that it reads from must not change.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.emulated_cuda import host_work, libraries, memory, waits

_RECORDS = 256  # taken at a time
_POISON = 85  # of integers; floating-point memory is NaN


@dataclass(frozen=True, eq=False, kw_only=True)
class Copy:
    """A copy in flight.

    Attributes:
        pinned: the host's tensor.
        values: those that are copied.
        to_host: direction.
        site: the lines that queued it.
    """

    pinned: torch.Tensor
    values: torch.Tensor
    to_host: bool
    site: str

    @property
    def end(self) -> int:
        """The address after the host's memory."""
        return self.pinned.data_ptr() + self.pinned.nbytes

    def arrive(self) -> None:
        """Write the values to the host's memory, or verify that they are still those in it."""
        with waits.uncounted():
            if self.to_host:
                self.pinned.copy_(self.values)
            elif not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (self.pinned, self.values))):
                raise RuntimeError(f"host memory changed while it was copied to the device; copied at {self.site}")


class CopiesInFlight:
    """The copies that the host has not waited for: of each stream, and of each event those that it follows."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._streams: dict[int, set[Copy]] = defaultdict(set)
        self._events: dict[int, set[Copy]] = {}
        self._records = (ctypes.c_size_t * (3 * _RECORDS))()

    def add(self, stream: int, copy: Copy) -> None:
        with self._lock:
            self.update()
            libraries.runtime.emulated_record(1)
            self._streams[stream].add(copy)

    def finish_uploads(self, stream: int) -> None:
        """Verify the uploads that a stream has waited for: the next operation on it may write to their memory."""
        with self._lock:
            self.update()
            self._arrive({copy for copy in self._streams[stream] if not copy.to_host})

    def read(self, stream: int, pinned: torch.Tensor) -> None:
        """Write the copies to this memory of the host that a stream has waited for: its next operation reads it."""
        begin, end = pinned.data_ptr(), pinned.data_ptr() + pinned.nbytes
        with self._lock:
            self.update()
            known = [copy for copy in self._streams[stream] if copy.to_host]
            self._arrive({copy for copy in known if begin < copy.end and copy.pinned.data_ptr() < end})

    def synchronized(self, stream: int) -> None:
        """The host has waited for the operations that are queued on a stream."""
        with self._lock:
            self.update()
            self._arrive(set(self._streams[stream]))

    def update(self) -> None:
        """Apply the synchronization that the runtime has recorded."""
        with self._lock:
            while count := libraries.runtime.emulated_take_records(self._records, _RECORDS):
                for at in range(0, 3 * count, 3):
                    self._follow(chr(self._records[at]), self._records[at + 1], self._records[at + 2])

    def _follow(self, operation: str, stream: int, event: int) -> None:
        """Operations are those of runtime.c."""
        if operation == "r":
            self._events[event] = set(self._streams[stream])
        elif operation == "w":
            self._streams[stream] |= self._events.get(event, set())
        elif operation == "x":
            self._events.pop(event, None)
        elif operation == "d":
            self._arrive(set().union(*self._streams.values()))
        elif operation == "s":
            self._arrive(set(self._streams[stream]))
        else:
            self._arrive(set(self._events.get(event, ())))

    def _arrive(self, arrived: set[Copy]) -> None:
        if not arrived:
            return
        for known in (*self._streams.values(), *self._events.values()):
            known -= arrived
        if not any(self._streams.values()):
            self._events.clear()
            libraries.runtime.emulated_record(0)
        for copy in arrived:
            copy.arrive()


in_flight = CopiesInFlight()


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The kernel of ``self.copy_(src)`` where one of them is on a device."""
    if src._is_zerotensor():
        return self.zero_()
    to_host, from_host = self.device.type == "cpu", src.device.type == "cpu"
    if not self.numel():
        return self
    target, source = (tensor if tensor.device.type == "cpu" else memory.on_host(tensor) for tensor in (self, src))
    if not (to_host or from_host):
        with waits.uncounted():
            target.copy_(source)
        return self
    if waits.is_gloo():  # whose own waits are not those of NCCL
        target.copy_(source)
        return self
    if from_host:
        host_work.note("copy to the device")
    with waits.uncounted():
        stream = torch.cuda.current_stream(src.device if to_host else self.device).cuda_stream
        is_pinned = (self if to_host else src).is_pinned()
    direction = "copy to the host" if to_host else "copy to the device"
    if not (non_blocking and is_pinned):
        waits.note(f"{direction}, {'pinned' if is_pinned else 'pageable'}{', non_blocking' * non_blocking}")
        if not non_blocking:
            in_flight.synchronized(stream)
        with waits.uncounted():
            target.copy_(source)
        return self
    with waits.uncounted():
        if from_host:
            in_flight.read(stream, src)
        copy = Copy(pinned=self if to_host else src, values=source.clone(), to_host=to_host, site=waits.site())
        if to_host:
            in_flight.finish_uploads(stream)
            self.fill_(float("nan") if self.is_floating_point() else _POISON)
        else:
            target.copy_(source)
        in_flight.add(stream, copy)
    return self


def install() -> None:
    """Count the calls that synchronize; copies arrive in these and in calls that query whether work is finished."""
    torch.cuda.set_sync_debug_mode = waits.set_debug_mode  # type: ignore[assignment]
    for owner, name, kind in (
        (torch.cuda, "synchronize", "device synchronize"),
        (torch.cuda.Stream, "synchronize", "stream synchronize"),
        (torch.cuda.Event, "synchronize", "event synchronize"),
        (torch.cuda.Stream, "query", None),
        (torch.cuda.Event, "query", None),
    ):
        setattr(owner, name, _watched(getattr(owner, name), kind))


def _watched(original: Callable[..., Any], kind: str | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kind is not None:
            waits.note(kind, explicit=True)
        result = original(*args, **kwargs)
        in_flight.update()
        return result

    return call
