"""The files of a checkpoint, written by a thread of each rank while training continues.

A thread, and not a forked process as megatron-core has it: a fork of a rank keeps the sockets of the rank open, so that the
others do not notice that it was killed, and shares its threads' locks. The thread has a copy of the values of one step. What
it does (writing, hashing, waiting for the disk) lets other threads run.
"""

from __future__ import annotations

import errno
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

from nemo_kto.artifacts.checkpoint_files import Written
from nemo_kto.device import device
from nemo_kto.utils.files import remove_folder

logger = logging.getLogger(__name__)

Write = Callable[[IO[bytes]], object]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PER_ENTRY_BYTES = 4096  # what torch's format adds to a tensor, at most


class PlannedSave(TorchDistSaveShardedStrategy):
    """megatron-core's strategy up to the point where every rank knows what it has to write; the writing is left to others.

    It hands over at a method that megatron-core 0.16 and 0.19 have both, where it would make up its forked writer.

    Attributes:
        of_copies: write copies, which training does not change. Their memory is kept for the next save.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.of_copies = False
        self._copies: list[torch.Tensor] = []
        self._writer: Any = None
        self._metadata: Any = None  # of the whole checkpoint, on rank 0

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *options: Any) -> AsyncRequest:
        """Plan what this rank writes, collective. ``options``: megatron-core 0.19 has one, and 0.16 none."""
        if self.of_copies:
            entries = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
            mine = [entry for entry in entries if is_main_replica(entry.replica_id)]
            for entry, copy in zip(mine, self._copied([entry.data for entry in mine]), strict=True):
                entry.data = copy
            device.synchronize()
        return super().async_save(sharded_state_dict, checkpoint_dir, *options)

    def take_files(self) -> tuple[dict[str, Write], list[WriteResult]]:
        """What this rank has to write of the state that was planned.

        Returns:
            Name of a file -> what writes it; and a list that then gets what :meth:`write_index` needs.
        """
        results: list[WriteResult] = []
        buckets = self._writer.write_buckets
        files = {name: _bucket_writer(name, [*objects, *tensors], results) for _, name, (objects, tensors) in buckets}
        self._writer.write_buckets = []  # the threads' now
        return files, results

    def write_index(self, results: Sequence[Sequence[WriteResult]]) -> None:
        """Write what says which tensor lies where, on rank 0; ``results`` are those of all ranks."""
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(self.backend, self.version), str(self._writer.checkpoint_dir))

    def _copied(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """On the host, in the memory of the last save: to get new memory takes longer than to copy into it."""
        if [(each.shape, each.dtype) for each in self._copies] != [(each.shape, each.dtype) for each in live]:
            self._copies = []  # freed before there are others
            self._copies = device.host_tensors(live)
        for copy, tensor in zip(self._copies, live, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return self._copies

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Sequence[Any], *_: object) -> AsyncRequest:
        self._writer, self._metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


def _bucket_writer(name: str, entries: list[tuple[Any, Any]], results: list[WriteResult]) -> Write:
    """Writes tensors and objects one after the other, as torch.distributed.checkpoint does."""

    def write(stream: IO[bytes]) -> None:
        for item, value in entries:
            start = stream.tell()
            if isinstance(value, torch.Tensor):
                torch.save(value.cpu(), stream)
            else:
                stream.write(value.getbuffer())
            length = stream.tell() - start
            place = _StorageInfo(name, start, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))

    return write


def writes(content: bytes) -> Write:
    """What writes these bytes."""
    return lambda stream: stream.write(content)


def bytes_to_write(sharded: ShardedStateDict) -> int:
    """How much this rank adds to a checkpoint: of copies on several ranks only the first one counts."""
    entries = [each for each in nested_values(sharded) if isinstance(each, ShardedBase)]
    tensors = [each.data for each in entries if is_main_replica(each.replica_id) and isinstance(each.data, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() + _PER_ENTRY_BYTES for tensor in tensors)


class FileWriter(threading.Thread):
    """Writes files below a folder, one after the other, hashed and flushed to the disk.

    Attributes:
        written: what each file holds, once it is done.
        problem: why it ended early.
    """

    def __init__(self, *, folder: Path, files: Mapping[str, Write]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.written: dict[str, Written] = {}
        self.problem: Exception | None = None
        self._folder = folder
        self._files = dict(files)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Write all files, or as many as can be written."""
        try:
            while self._files:
                name = next(iter(self._files))
                self.written[name] = write_file(self._folder / name, self._files[name], stopped=self._stopped)
                del self._files[name]  # and with it the copies that it holds
        except Exception as error:
            self.problem = error
        finally:
            self._files = {}

    def stop(self) -> None:
        """Write no more than the piece at hand, and wait for that."""
        self._stopped.set()
        self.join()


class FolderRemover(threading.Thread):
    """Removes checkpoints that are no longer wanted: of large files that takes seconds."""

    def __init__(self, *, folders: Sequence[Path]) -> None:
        super().__init__(name="checkpoint removal", daemon=True)
        self._folders = folders

    def run(self) -> None:
        """Remove them; what cannot be removed is named in a warning, and its leftovers go with the next start of the run."""
        for folder in self._folders:
            try:
                remove_folder(folder)
            except OSError as error:
                logger.warning("%s could not be removed: %s", folder, error.strerror)


class _HashingStream:
    """A binary file that is only written to, from its start to its end, and hashed on the way."""

    def __init__(self, file: IO[bytes], stopped: threading.Event | None) -> None:
        self._file, self._stopped = file, stopped
        self.hash, self.size = hashlib.sha256(), 0
        self.problem: OSError | None = None  # torch.save raises an error of its own after it

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
    """Write a file, flush it to the disk, and say what it holds.

    Raises:
        OSError: it cannot be written.
        InterruptedError: it was to be ``stopped``.
    """
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
