"""Content hash of the examples of a run, which a resumed run compares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from datasets.table import MemoryMappedTable

from nemo_kto.utils.hashes import MIN_KEPT_BYTES, stored_hash

if TYPE_CHECKING:
    import pyarrow

_NOT_CONTENT = ("line", "prompt_cut", "response_cut")  # origin of an example, and whether it was truncated


def examples_hash(files: Sequence[Path], index: np.ndarray) -> str:
    """Return a hash of the examples at the positions ``index`` [N] (int64) of the concatenated files of ``TokenCache``.

    The hash of each large file is stored next to it, so that hashing millions of examples costs no more than their index.
    """
    whole = hashlib.sha256()
    for file in files:
        whole.update(_file_hash(file).encode())
    whole.update(np.ascontiguousarray(index, dtype="<i8").tobytes())
    return whole.hexdigest()


def _file_hash(file: Path) -> str:
    """Return a hash of the token ids, labels, rewards and weights in a file; it does not depend on how the file groups them.

    That of a large file is stored; it stays valid because the file name identifies everything that the file was made from.
    """
    state = file.stat()
    if state.st_size < MIN_KEPT_BYTES:
        return _content_hash(file)
    stored, private = file.parent / "hashes" / f"{file.stem}.sha256", not state.st_mode & 0o077  # permissions of the file
    return stored_hash(stored, lambda: _content_hash(file), private=private)


def _content_hash(file: Path) -> str:
    table, whole = MemoryMappedTable.from_file(str(file)), hashlib.sha256()
    for name in sorted(set(table.column_names) - set(_NOT_CONTENT)):
        if name == "weight" and all(
            (chunk.to_numpy(zero_copy_only=False) == 1).all() for chunk in table.column(name).chunks
        ):
            continue  # examples without weights keep the hash they had before weights were introduced
        whole.update(f"{name} {_column_hash(table.column(name))}\n".encode())
    return whole.hexdigest()


def _column_hash(column: pyarrow.ChunkedArray) -> str:
    lengths, values = hashlib.sha256(), hashlib.sha256()
    for chunk in column.chunks:
        if hasattr(chunk, "value_lengths"):  # one list per example
            lengths.update(np.ascontiguousarray(chunk.value_lengths().to_numpy(), dtype="<i8").tobytes())
            chunk = chunk.flatten()
        array = np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False))
        assert array.dtype != object, f"{column.type} has no bytes of its own"
        values.update(array.tobytes())
    return lengths.hexdigest() + values.hexdigest()
