"""What the examples of a run are, by their content: a hash that a resumed run compares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from datasets.table import MemoryMappedTable

from nemo_kto.utils.files import kept_hash, make_folder, publish_file
from nemo_kto.utils.hashes import MIN_KEPT_BYTES

if TYPE_CHECKING:
    import pyarrow

_NOT_CONTENT = ("line", "prompt_cut", "response_cut")  # where an example came from, and what truncation took from it


def examples_hash(files: Sequence[Path], index: np.ndarray) -> str:
    """Hash of examples and their order.

    The hash of every large file is kept beside it, so that millions of examples cost no more than the index does.

    Args:
        files: of ``TokenCache``, one after the other.
        index: [N] int64, the place in these files of each example.
    """
    whole = hashlib.sha256()
    for file in files:
        whole.update(_file_hash(file).encode())
    whole.update(np.ascontiguousarray(index, dtype="<i8").tobytes())
    return whole.hexdigest()


def _file_hash(file: Path) -> str:
    """Of token ids, labels, rewards and weights, however the file groups them; its name says all that it was made of."""
    kept, state = file.parent / "hashes" / f"{file.stem}.sha256", file.stat()
    if state.st_size < MIN_KEPT_BYTES:
        return _content_hash(file)
    if (known := kept_hash(kept)) is not None:
        return known
    found, private = _content_hash(file), not state.st_mode & 0o077  # as the file itself
    make_folder(kept.parent, private=private)
    with publish_file(kept, private=private, durable=False) as writing:
        writing.write_text(found, encoding="ascii")
    return found


def _content_hash(file: Path) -> str:
    table, whole = MemoryMappedTable.from_file(str(file)), hashlib.sha256()
    for name in sorted(set(table.column_names) - set(_NOT_CONTENT)):
        if name == "weight" and not _has_weights(table.column(name)):
            continue  # rows without weights have the hash that they had before there were weights
        whole.update(f"{name} {_column_hash(table.column(name))}\n".encode())
    return whole.hexdigest()


def _has_weights(column: pyarrow.ChunkedArray) -> bool:
    return any((chunk.to_numpy(zero_copy_only=False) != 1).any() for chunk in column.chunks)


def _column_hash(column: pyarrow.ChunkedArray) -> str:
    lengths, values = hashlib.sha256(), hashlib.sha256()
    for chunk in column.chunks:
        if hasattr(chunk, "value_lengths"):  # a list for each example
            lengths.update(np.ascontiguousarray(chunk.value_lengths().to_numpy(), dtype="<i8").tobytes())
            chunk = chunk.flatten()
        array = np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False))
        assert array.dtype != object, f"{column.type} has no bytes of its own"
        values.update(array.tobytes())
    return lengths.hexdigest() + values.hexdigest()
