"""The safetensors files of a Hugging Face folder: which weight lies where, and writing a sharded set of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a safetensors file; reads only its header."""
    with safe_open(file, framework="pt") as handle:
        names = list(handle.keys())
        return {name: tuple(handle.get_slice(name).get_shape()) for name in names}


def find_weights(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of every weight in a folder; reads only the headers of the files.

    Raises:
        FileNotFoundError: there are no safetensors, or the index names a file that is not there.
    """
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(index.values()))]
    else:
        files = [folder / "model.safetensors"]
    if absent := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(
            f"{folder} must hold its weights as safetensors, but {', '.join(absent)} is not there; "
            "load the model with transformers and write it with save_pretrained"
        )
    return {name: (file, shape) for file in files for name, shape in tensor_shapes(file).items()}


@dataclass(kw_only=True, eq=False)
class ShardWriter:
    """Writes weights into safetensors files of limited size, holding no more than one file's worth at a time.

    Attributes:
        folder: an existing folder.
        max_shard_bytes: a file is closed before it would grow beyond this, unless a single weight is bigger.
    """

    folder: Path
    max_shard_bytes: int

    def __post_init__(self) -> None:
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = self._total_bytes = 0
        self._parts: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one weight; it must not change before the next call of ``add`` or ``close`` that writes it."""
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + size > self.max_shard_bytes:
            self._flush()
        self._shard[name] = tensor.contiguous()
        self._shard_bytes += size
        self._total_bytes += size

    def close(self, *, mark: str) -> None:
        """Write what is left, give the files their final names, and write the index, with ``mark`` in its metadata."""
        self._flush()
        weight_map = {}
        for number, names in enumerate(self._parts):
            file = f"model-{number + 1:05d}-of-{len(self._parts):05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        metadata = {"total_size": self._total_bytes, "written_by": mark}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if self._shard:
            save_file(self._shard, self._part(len(self._parts)), metadata={"format": "pt"})
            self._parts.append(list(self._shard))
            self._shard, self._shard_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}"
