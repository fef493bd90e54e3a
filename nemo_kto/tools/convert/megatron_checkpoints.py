"""Checkpoints of NeMo-Aligner, Megatron-LM and Megatron-Bridge: where their weights, settings and tokenizers are.

FILE.nemo, a tar archive     model_config.yaml, a tokenizer, and model_weights/ (torch_dist) or model_weights.ckpt
ITERATION of Megatron-Bridge run_config.yaml, tokenizer/, and the files of torch_dist
ITERATION of Megatron-LM     common.pt with the arguments, and the files of torch_dist

ITERATION is a folder iter_0001000, or the folder above it, whose latest_checkpointed_iteration.txt names one.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from nemo_kto.checkpoint.safe_loading import BACKENDS, COMMON, load_plain, read_arguments, read_errors, read_folder_metadata
from nemo_kto.errors import UserError, printable
from nemo_kto.utils.files import load_yaml, open_file, read_bytes, read_json

_NEMO, _BRIDGE, _LATEST = "model_config.yaml", "run_config.yaml", "latest_checkpointed_iteration.txt"
_MAX_MEMBERS, _MAX_DEPTH = 100_000, 32
_SettingsAndTokenizer = tuple[Mapping[str, Any], Path | str | None]  # as in MegatronCheckpoint
_CONVERT = (
    "convert it with Megatron-LM, which still reads it: the command of its training with --ckpt-convert-format torch_dist "
    "--ckpt-convert-save NEW, then import NEW (zarr needs a version before megatron-core 0.13)"
)
_MERGE = (
    "merge its parts with NeMo: python examples/nlp/language_modeling/megatron_change_num_partitions.py --model_file={file} "
    "--target_file=NEW.nemo --tensor_model_parallel_size=-1 --target_tensor_model_parallel_size=1 "
    "--pipeline_model_parallel_size=-1 --target_pipeline_model_parallel_size=1, then import NEW.nemo"
)


@dataclass(frozen=True, kw_only=True)
class MegatronCheckpoint:
    """A checkpoint that can be imported."""

    path: Path  # for messages
    tensors: StoredTensors
    settings: Mapping[str, Any]  # of the model, under the names of the program that wrote it; empty if there are none
    # Folder with the tokenizer in Hugging Face's format, a SentencePiece model, or the name of the tokenizer on the hub.
    tokenizer: Path | str | None = None


@contextlib.contextmanager
def open_checkpoint(path: Path, *, within: Path) -> Iterator[MegatronCheckpoint]:
    """Open a checkpoint; an archive is unpacked into a temporary folder in ``within`` during the block.

    Raises UserError if it has another format, is damaged or unsafe, or cannot be read and must be converted first.
    """
    if path.is_file():
        with tempfile.TemporaryDirectory(dir=within, prefix=".import-") as folder:
            unpack(path, Path(folder))
            yield _find(Path(folder), path)
    else:
        yield _find(path, path)


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar archive, compressed or not, of regular files and folders only.

    Raises UserError if it is no such archive, a member would be outside of ``target`` or is a link, or there is no room.
    """
    try:
        with tarfile.open(archive) as tar:
            for number, member in enumerate(tar):
                parts = PurePosixPath(member.name).parts
                is_known = member.isdir() or (member.isfile() and not member.name.startswith("/"))
                if not is_known or ".." in parts or len(parts) > _MAX_DEPTH or number >= _MAX_MEMBERS:
                    text = f"must be an archive of at most {_MAX_MEMBERS:,} regular files, at most {_MAX_DEPTH} folders deep"
                    raise UserError(f"FILE {text}, got {archive} with {printable(member.name)}; do not trust it")
                if member.isdir():
                    continue
                if member.size > (free := shutil.disk_usage(target).free):
                    text = f"{target.parents[1]} must have room for the unpacked {archive.name}, which has {member.name} of"
                    raise UserError(f"{text} {member.size / 1e9:.1f} GB, got {free / 1e9:.1f} GB; free some space")
                file = target / member.name
                file.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None, "a regular file has content"
                with file.open("xb") as writing:
                    shutil.copyfileobj(content, writing, 2**24)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = "must be a .nemo archive (tar, also compressed) or a checkpoint folder"
        raise UserError(f"FILE {text}, got {archive}: {reason}; copy it again, or correct the path") from error


def _find(folder: Path, path: Path) -> MegatronCheckpoint:
    """Return the checkpoint in a folder; ``path`` is what the user named."""
    if (folder / _LATEST).is_file():
        name = read_bytes(folder / _LATEST, limit=100).decode(errors="replace").strip()
        named = folder / (f"iter_{int(name):07d}" if name.isdecimal() else "release")
        if not named.is_dir():
            raise UserError(
                f"{folder / _LATEST} must name an iteration that exists, got {name}; correct it, or name its folder"
            )
        folder = named
    settings, tokenizer = _read_nemo(folder) if (folder / _NEMO).is_file() else _read_megatron(folder)
    weights = folder / "model_weights" if (folder / "model_weights").is_dir() else folder
    if (folder / "model_weights.ckpt").is_file():
        tensors: StoredTensors = TorchFile(file=folder / "model_weights.ckpt")
    elif (weights / ".metadata").is_file():
        tensors = TorchDist(folder=weights)
    else:
        raise UserError(_why_not(weights, path))
    if any(".language_model." in name for name in tensors.shapes):
        text = f"FILE must have the layers of megatron-core, got {path}, which has those of NeMo before 2024"
        script = "scripts/checkpoint_converters/convert_gpt_nemo_to_mcore.py"
        command = f"python {script} --input_name_or_path UNPACKED --output_path NEW.nemo"
        raise UserError(f"{text}; convert it with NeMo: {command}, then import NEW.nemo")
    return MegatronCheckpoint(path=path, tensors=tensors, settings=settings, tokenizer=tokenizer)


def _why_not(folder: Path, path: Path) -> str:
    """Return the message for a folder without weights that can be read."""
    must = "FILE must be a .nemo archive or a torch_dist checkpoint"
    backend = read_json(folder / BACKENDS).get("sharded_backend") if (folder / BACKENDS).is_file() else None
    if backend == "zarr" or next(folder.glob("*/.zarray"), None) is not None:
        return f"{must}, got {path}, whose weights are in zarr; {_CONVERT}"
    if backend is not None:
        return f"{must}, got {path} in the format {backend}; {_CONVERT}"
    if next(folder.glob("*/model_weights.ckpt"), None) is not None:
        return f"{must}, got {path} with one pickle for each model-parallel rank; {_MERGE.format(file=path)}"
    if next(folder.glob("mp_rank_*/*.pt"), None) is not None:
        return f"{must}, got {path} with one pickle for each model-parallel rank; {_CONVERT}"
    return f"{must}, got {path}, which has neither .metadata nor {_NEMO}; correct the path"


def _read_nemo(folder: Path) -> _SettingsAndTokenizer:
    settings = _read_yaml(folder / _NEMO)
    named = settings.get("tokenizer")
    tokenizer = named if isinstance(named, dict) else {}
    for name in ("model", "vocab_file", "type"):
        value = tokenizer.get(name)
        if not isinstance(value, str):
            continue
        if value.startswith("nemo:"):
            file = folder / PurePosixPath(value.removeprefix("nemo:")).name
            return settings, file if file.is_file() else None
        if name == "type" and tokenizer.get("library") == "huggingface":
            return settings, value
    return settings, None


def _read_megatron(folder: Path) -> _SettingsAndTokenizer:
    settings: Mapping[str, Any] = {}
    tokenizer: Mapping[str, Any] = {}
    if (folder / _BRIDGE).is_file():
        content = _read_yaml(folder / _BRIDGE)
        settings, tokenizer = (
            value if isinstance(value := content.get(key), dict) else {} for key in ("model", "tokenizer")
        )
    elif (folder / COMMON).is_file():
        settings = tokenizer = read_arguments(folder / COMMON)
    if (folder / "tokenizer").is_dir():
        return settings, folder / "tokenizer"
    names = (tokenizer.get("tokenizer_model"), tokenizer.get("hf_tokenizer_model"), settings.get("hf_model_id"))
    return settings, next((name for name in names if isinstance(name, str) and name), None)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = load_yaml(read_bytes(file))
        if isinstance(content, dict):
            return content
        reason = f"it is a {type(content).__name__}"
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
    raise UserError(
        f"{file.name} must be a YAML file with the settings of the model, got another ({reason}); write it again"
    )


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
                    part = self._load(name, tuple(chunk.offsets), tuple(chunk.sizes))[tuple(inside)]
                    where = zip(chunk.offsets[first:], chunk.sizes[first:], strict=True)
                    values[tuple(slice(offset, offset + size) for offset, size in where)] = part
                    found += part.numel()
            if found != values.numel():
                raise UserError(f"{self._folder} must contain all of {name}, got {found} of {values.numel()} values")
            return values

    def _load_chunk(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        info = self._metadata.storage_data[MetadataIndex(name, torch.Size(offsets))]
        if getattr(info, "transform_descriptors", None):
            raise UserError(f"{self._folder} must not be compressed, got {info.transform_descriptors}; save it uncompressed")
        with open_file(self._folder / info.relative_path) as handle:
            handle.seek(info.offset)
            tensor = torch.load(io.BytesIO(handle.read(info.length)), map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise ValueError(f"{name} in {info.relative_path} is not a tensor of shape {list(sizes)}")
        return tensor


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
