"""Writing the files of a checkpoint in a thread of each rank while training continues.

A thread is used instead of megatron-core's forked process: a fork of a rank keeps the rank's sockets open, so that the other
ranks do not notice when it is killed, and it inherits the locks of the rank's threads. The writer thread works on a copy of
the values of one step, and its work (writing, hashing, waiting for the disk) releases the GIL.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from nemo_kto.device import device
from nemo_kto.model_files.checkpoint_files import Written
from nemo_kto.utils.files import remove_folder

logger = logging.getLogger(__name__)

Write = Callable[[IO[bytes]], object]

_PER_ENTRY_BYTES = 4096  # upper bound of the overhead of torch's format per tensor


class PlannedSave(TorchDistSaveShardedStrategy):
    """megatron-core's save strategy up to the plan of what each rank writes; the caller does the writing.

    It takes over at a method that exists in megatron-core 0.16 and 0.19, where these would create their forked writer.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.copies_to_host = False  # write host copies, which training does not change; the next save reuses their memory
        self._copies: list[torch.Tensor] = []
        self._writer: Any = None
        self._metadata: Any = None  # metadata of the whole checkpoint, on rank 0

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *options: Any) -> AsyncRequest:
        """Plan what this rank writes; collective. ``options``: megatron-core 0.19 passes one, 0.16 none."""
        if self.copies_to_host:
            entries = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
            own = [entry for entry in entries if is_main_replica(entry.replica_id)]
            for entry, copy in zip(own, self.copied_to_host([entry.data for entry in own]), strict=True):
                entry.data = copy
            device.synchronize()
        return super().async_save(sharded_state_dict, checkpoint_dir, *options)

    def copied_to_host(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the host, into the memory of the last save: allocating takes longer than copying."""
        if [(each.shape, each.dtype) for each in self._copies] != [(each.shape, each.dtype) for each in live]:
            self._copies = []  # freed before the new ones are allocated
            self._copies = device.host_tensors(live)
        for copy, tensor in zip(self._copies, live, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return self._copies

    def take_files(self) -> tuple[dict[str, Write], list[WriteResult]]:
        """Return functions that write this rank's files, by name, and the list they fill for :meth:`write_index`."""
        results: list[WriteResult] = []
        buckets = self._writer.write_buckets
        files = {name: _bucket_writer(name, [*objects, *tensors], results) for _, name, (objects, tensors) in buckets}
        self._writer.write_buckets = []  # owned by the writer thread from now on
        return files, results

    def write_index(self, results: Sequence[Sequence[WriteResult]]) -> None:
        """Write the index of where each tensor is stored, on rank 0; ``results`` are those of all ranks."""
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(self.backend, self.version), str(self._writer.checkpoint_dir))

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Sequence[Any], *_: object) -> AsyncRequest:
        self._writer, self._metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


def _bucket_writer(name: str, entries: list[tuple[Any, Any]], results: list[WriteResult]) -> Write:
    """Return a function that writes tensors and objects as torch.distributed.checkpoint does."""

    def write(stream: IO[bytes]) -> None:
        for item, value in entries:
            start = stream.tell()
            if isinstance(value, torch.Tensor):
                torch.save(value.cpu(), stream)
            else:
                stream.write(value.getbuffer())
            length = stream.tell() - start
            storage = _StorageInfo(name, start, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=storage))

    return write


def write_bytes(content: bytes) -> Write:
    return lambda stream: stream.write(content)


def bytes_to_write(sharded: ShardedStateDict) -> int:
    """Return the bytes this rank adds to a checkpoint; of replicated values only the main replica counts."""
    entries = [each for each in nested_values(sharded) if isinstance(each, ShardedBase)]
    tensors = [each.data for each in entries if is_main_replica(each.replica_id) and isinstance(each.data, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() + _PER_ENTRY_BYTES for tensor in tensors)


class FileWriter(threading.Thread):
    """Thread that writes files below a folder one after the other, hashes them, and flushes them to the disk."""

    def __init__(self, *, folder: Path, files: Mapping[str, Write]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.written: dict[str, Written] = {}  # size and hash of each finished file
        self.problem: Exception | None = None  # the error that stopped the thread early
        self._folder = folder
        self._files = dict(files)
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            while self._files:
                name = next(iter(self._files))
                self.written[name] = write_file(self._folder / name, self._files[name], stopped=self._stopped)
                del self._files[name]  # releases the copies it holds
        except Exception as error:
            self.problem = error
        finally:
            self._files = {}

    def stop(self) -> None:
        """Stop after the write in progress, and wait for it."""
        self._stopped.set()
        self.join()


def start_removal(folders: Sequence[Path]) -> threading.Thread:
    """Remove checkpoints that are no longer kept in a thread, because removing large files takes seconds.

    If this fails, a warning is logged, and the next start of the run removes the leftovers.
    """

    def remove() -> None:
        for folder in folders:
            try:
                remove_folder(folder)
            except OSError as error:
                logger.warning("%s could not be removed: %s", folder, error.strerror)

    thread = threading.Thread(target=remove, name="checkpoint removal", daemon=True)
    thread.start()
    return thread


class _HashingStream:
    """Sequential, write-only binary stream that hashes its data."""

    def __init__(self, file: IO[bytes], stopped: threading.Event | None) -> None:
        self._file, self._stopped = file, stopped
        self.hash, self.size = hashlib.sha256(), 0
        self.problem: OSError | None = None  # kept because torch.save replaces it with an error of its own

    def write(self, data: Any) -> int:
        if self._stopped is not None and self._stopped.is_set():
            raise InterruptedError("the save was stopped")
        try:
            self._file.write(data)
        except OSError as error:
            self.problem = error
            raise
        self.hash.update(data)
        length = memoryview(data).nbytes
        self.size += length
        return length

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()


def write_file(file: Path, write: Write, *, stopped: threading.Event | None = None) -> Written:
    """Write a file, flush it to the disk, and return its size and hash; raise InterruptedError if ``stopped`` is set."""
    with file.open("wb") as plain:
        stream = _HashingStream(plain, stopped)
        try:
            write(cast(IO[bytes], stream))
        except Exception:
            if stream.problem is not None:
                raise stream.problem from None
            raise
        plain.flush()
        os.fsync(plain.fileno())
    return Written(stream.size, stream.hash.hexdigest())
