"""Tensors of checkpoints of other programs, read one at a time without ranks, and without running code in their files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from nemo_kto.checkpoint.safe_loading import load_plain, read_errors, read_folder_metadata
from nemo_kto.errors import UserError
from nemo_kto.utils.files import open_file


class StoredTensors(Protocol):
    """Named tensors of a checkpoint."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return the tensor, or the part of it with this index in its first dimensions."""


class TorchDist:
    """Tensors of a folder in megatron-core's format torch_dist.

    Raises UserError if a file is missing or damaged, or contains anything but tensors.
    """

    def __init__(self, *, folder: Path) -> None:
        self._folder = folder
        self._metadata = read_folder_metadata(folder)
        self._load = lru_cache(maxsize=2)(self._load_chunk)  # a chunk may contain several layers or experts
        with read_errors(folder):
            entries = self._metadata.state_dict_metadata.items()
            self._entries = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(entry.size) for name, entry in self._entries.items()}

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        with read_errors(self._folder):
            entry, first = self._entries[name], len(index)
            values = torch.empty(entry.size[first:], dtype=entry.properties.dtype)
            found = 0
            for chunk in entry.chunks:
                inside = [place - offset for place, offset in zip(index, chunk.offsets, strict=False)]
                if all(0 <= place < size for place, size in zip(inside, chunk.sizes, strict=False)):
                    part = self._load(name, chunk_key(chunk))[tuple(inside)]
                    where = zip(chunk.offsets[first:], chunk.sizes[first:], strict=True)
                    values[tuple(slice(offset, offset + size) for offset, size in where)] = part
                    found += part.numel()
            if found != values.numel():
                raise UserError(f"{self._folder} must contain all of {name}, got {found} of {values.numel()} values")
            return values

    def _load_chunk(self, name: str, key: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
        offsets, sizes = key
        info = self._metadata.storage_data[MetadataIndex(name, torch.Size(offsets))]
        if getattr(info, "transform_descriptors", None):
            raise UserError(f"{self._folder} must not be compressed, got {info.transform_descriptors}; save it uncompressed")
        with open_file(self._folder / info.relative_path) as handle:
            handle.seek(info.offset)
            tensor = torch.load(io.BytesIO(handle.read(info.length)), map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise ValueError(f"{name} in {info.relative_path} is not a tensor of shape {list(sizes)}")
        return tensor


def chunk_key(chunk: ChunkStorageMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of a chunk."""
    return tuple(chunk.offsets), tuple(chunk.sizes)


class TorchFile:
    """Tensors of a state dict in one file of torch.save; raises UserError if it contains anything but plain data."""

    def __init__(self, *, file: Path) -> None:
        self._file = file

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        content = load_plain(self._file)
        content = content.get("state_dict", content) if isinstance(content, dict) else {}
        return {name: value for name, value in content.items() if isinstance(value, Tensor)}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._tensors.items()}

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        return self._tensors[name][index]
