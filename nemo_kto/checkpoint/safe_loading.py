"""Loading the files of a checkpoint without running code that they may contain.

A pickle can call any function of any module while it is read, and some files of a checkpoint are pickles: its metadata, its
common state, its shards and its random generators. megatron-core leaves reading the metadata, and objects in shards, to
torch.distributed.checkpoint, which restricts neither. This module reads all of them with lists of allowed names.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import pickle  # nosec B403  # only names on an allowlist are loaded
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, Metadata, filesystem
from torch.distributed.checkpoint.planner import ReadItem

from nemo_kto.errors import UserError
from nemo_kto.processes.watchdog import is_lost_connection
from nemo_kto.utils.files import MAX_FILE_BYTES, open_file, read_json

_REMEDY = "take another checkpoint (nemo-kto checkpoint verify FOLDER shows which are intact)"
_METADATA, COMMON, BACKENDS = ".metadata", "common.pt", "metadata.json"
# Classes whose construction has no side effects, and one function, which looks up a name in a table.
_ALLOWED_IN_METADATA = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
}  # fmt: skip


class _ForbiddenName(pickle.UnpicklingError):
    """A pickle refers to a name that is not allowed."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED_IN_METADATA.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        raise _ForbiddenName(f"{module}.{name}")


def _enum_member(owner: object, name: str) -> enum.Enum:
    """Return a member of an enum: Python 3.11.0 to 3.11.3 pickle enum members as calls of getattr."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__):
        raise _ForbiddenName("builtins.getattr")
    return owner[name]


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors in a block that uses a checkpoint's file or folder into a UserError that names it.

    Python and torch may raise any exception for a value whose type or shape differs from what this program writes. Errors of
    the machine and of other ranks pass unchanged.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is no subclass of Exception
        failures = getattr(error, "failures", {})  # of a CheckpointException: rank -> (error, traceback)
        cause = next((failure for failure, _ in failures.values()), error)
        if isinstance(cause, UserError):
            raise cause from error
        if isinstance(cause, MemoryError | torch.OutOfMemoryError) or is_lost_connection(cause):
            raise
        if isinstance(cause, OSError) and cause.strerror:
            raise UserError(f"{cause.filename or path} cannot be read: {cause.strerror}; {_REMEDY}") from error
        if (refused := re.search(r"GLOBAL ([\w.]+)", str(cause))) is not None:  # the name that torch refuses to load
            raise UserError(f"{path} must contain only tensors and plain data, got {refused[1]}; {_REMEDY}") from error
        message = (str(cause).splitlines() or [""])[0][:200]
        raise UserError(
            f"{path} is not a valid part of a checkpoint ({type(cause).__name__}: {message}); {_REMEDY}"
        ) from error


def read_metadata(stream: IO[bytes], *, file: Path | None = None) -> Metadata:
    """Read the metadata of a checkpoint in torch's distributed format; ``file`` is the path of a stream without a name.

    Raises UserError if it refers to anything but metadata, or to a file outside the folder.
    """
    file = Path(stream.name) if file is None else file
    must = f"{file} must contain only checkpoint metadata"
    try:
        metadata = _MetadataUnpickler(stream).load()
        paths = [info.relative_path for info in metadata.storage_data.values()]
    except _ForbiddenName as error:
        raise UserError(f"{must}, got {error}; {_REMEDY}") from None
    except Exception as error:  # a broken pickle can raise any exception
        raise UserError(f"{file} is not valid checkpoint metadata ({error}); {_REMEDY}") from error
    if not isinstance(metadata, Metadata):
        raise UserError(f"{must}, got {type(metadata).__name__}; {_REMEDY}")
    if outside := [path for path in paths if not isinstance(path, str) or Path(path).name != path]:
        raise UserError(f"{file} must refer to files in its own folder, got {outside[0]}; {_REMEDY}")
    return metadata


def read_folder_metadata(folder: Path) -> Metadata:
    """Read the metadata of a checkpoint and check that its files exist; raises like :func:`read_metadata`."""
    with read_errors(folder / _METADATA), open_file(folder / _METADATA) as stream:
        metadata = read_metadata(stream, file=folder / _METADATA)
    with read_errors(folder):
        for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
            open_file(folder / name).close()  # refuses a pipe, on which torch would wait
    return metadata


def read_arguments(file: Path) -> dict[str, Any]:
    """Return the arguments of Megatron-LM in a checkpoint's common.pt; empty if it has none.

    Only plain data is constructed: in the place of every other object, and of tensors, is a placeholder, so that no name in
    the file is imported. Raises UserError if the file is not one of torch.save.
    """
    with read_errors(file), open_file(file) as stream, zipfile.ZipFile(stream) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        if (size := archive.getinfo(name).file_size) > MAX_FILE_BYTES:
            raise UserError(f"{file} must have at most {MAX_FILE_BYTES:,} bytes beside its tensors, got {size:,}; {_REMEDY}")
        content = _ArgumentsUnpickler(io.BytesIO(archive.read(name))).load()
        return dict(vars(content["args"])) if "args" in content else {}


class _Placeholder(dict[Any, Any]):
    """Takes the place of an object of a class that is not listed, and ignores what the pickle does with it."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None: ...

    def append(self, item: object) -> None: ...


class _ArgumentsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return argparse.Namespace if (module, name) == ("argparse", "Namespace") else _Placeholder

    def persistent_load(self, pid: object) -> None:
        """Leave a tensor out."""


def load_plain(file: Path) -> Any:
    """Load tensors and plain data from a file of torch.save; raise UserError if it has anything else or is unreadable."""
    with read_errors(file), open_file(file) as stream:
        return torch.load(stream, map_location="cpu", weights_only=True)


def load_sharded(sharded: ShardedStateDict, folder: Path) -> StateDict:
    """Load the ``state`` folder of a checkpoint with ``dist_checkpointing.load``; collective.

    The pickles are checked first, so that the rank that finds a problem raises an error that names the file. While
    megatron-core loads, torch reads the pickles by the same rules, so that changes made in between are refused too. Raises
    UserError if a file could run code when loaded, or is not as this program writes it.
    """
    backends = read_json(folder / BACKENDS, remedy=_REMEDY)
    found = (backends.get("sharded_backend"), backends.get("common_backend", "torch"))
    if found != ("torch_dist", "torch"):  # other formats have their own readers, which load other pickles
        raise UserError(f"{folder / BACKENDS} must have the formats torch_dist and torch, got {found}; {_REMEDY}")
    read_folder_metadata(folder)
    if (folder / COMMON).exists():
        load_plain(folder / COMMON)
    restricted = SimpleNamespace(load=read_metadata, dump=pickle.dump, dumps=pickle.dumps)
    with (
        read_errors(folder),
        _replaced(filesystem, "pickle", restricted),
        _replaced(DefaultLoadPlanner, "load_bytes", _load_bytes),
    ):
        return cast(StateDict, dist_checkpointing.load(sharded, str(folder)))


_load_trusted_bytes = DefaultLoadPlanner.load_bytes


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Call torch's own function, which would unpickle anything, with bytes that the restricted reader has loaded."""
    plain = io.BytesIO()
    torch.save(torch.load(value, map_location="cpu", weights_only=True), plain)
    plain.seek(0)
    _load_trusted_bytes(self, read_item, plain)


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
