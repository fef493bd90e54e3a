"""The safetensors files of a Hugging Face folder: locating weights, and writing a sharded set of files."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_kto.architecture.family import name_in_file, prefixes_of
from nemo_kto.errors import UserError, either, printable, show
from nemo_kto.utils.files import file_inside, irregular, open_file, other_format, read_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # the only file of a model without an index
WRITTEN_BY = "nemo_kto"  # marks files of this program in their metadata
_REMEDY = "download or write it again"
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes per value
FP8, FP8_SCALE, INT32, UINT8 = "F8_E4M3", "F8_E8M0", "I32", "U8"
# The same for tensors of quantized weights (huggingface/quantized.py), and of masks of GPT-NeoX and GPT-J.
_OTHERS = {
    FP8: 1, "F8_E5M2": 1, FP8_SCALE: 1, "I8": 1, UINT8: 1, "BOOL": 1, "I16": 2, "U16": 2, INT32: 4, "U32": 4, "I64": 8,
}  # fmt: skip
_FORMAT_BYTES = 64  # enough to recognise a file of another format
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIGITS, _MAX_VALUES = 18, 2**56  # of a number and in a tensor; the format's own limits are those of 64 bits
EMBEDDING_WEIGHT, OUTPUT_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 2**24  # at a time

Shapes = dict[str, tuple[int, ...]]
"""Names of weights in a file -> their shapes."""


class FileTensor(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as the header names it


class _InvalidHeader(ValueError):
    """The message describes the problem."""


def tensor_shapes(file: Path) -> Shapes:
    """Return the shape of every tensor in a safetensors file; reads only its header.

    Raises UserError if it is not a safetensors file, is truncated, or holds other types than floats.
    """
    return {name: tensor.shape for name, tensor in read_header(file)[0].items()}


def read_header(file: Path, *, quantized: bool = False) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return every tensor in a safetensors file, and its metadata; raises like :func:`tensor_shapes`.

    Tensors of ``quantized`` weights may have the types in which these are stored.
    """
    try:
        with open_file(file) as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(0)
            start = handle.read(_FORMAT_BYTES)
            # a safetensors header begins with "{", after a length whose bytes may look like another format
            if start[8:9] != b"{" and (message := other_format(start)) is not None:
                raise UserError(f"{file} must be a safetensors file, but it is {message}")
            handle.seek(0)
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > _MAX_HEADER_BYTES:
                raise _InvalidHeader("it has no header")
            if size < 8 + length:
                raise _InvalidHeader(f"it has {size} bytes and its header {length}")
            header = _parse_json(handle.read(length).decode())
        return _parse_header(file, header, size - 8 - length, sizes=FLOATS | _OTHERS if quantized else FLOATS)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; {_REMEDY}") from error
    except _InvalidHeader as error:
        raise UserError(f"{file} must be a complete safetensors file, but {error}; {_REMEDY}") from None
    except (ValueError, RecursionError) as error:
        message = f"{file} must be a safetensors file, but its header is not valid JSON ({error})"
        raise UserError(f"{message}; {_REMEDY}") from error


def _parse_json(text: str) -> object:
    """Return the JSON of a header; ValueError for extensions and repeated names, which the safetensors library refuses."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(content := dict(pairs)) < len(pairs):
            raise ValueError("a name is repeated")
        return content

    def count(digits: str) -> int:
        if digits == "-0" or len(digits) > _MAX_DIGITS:
            raise ValueError(f"the number {printable(digits, 30)} is no count")
        return int(digits)

    content = json.loads(text, object_pairs_hook=unique, parse_int=count, parse_constant=count)
    json.dumps(content, ensure_ascii=False).encode()  # fails for lone surrogates
    return content


def _parse_header(
    file: Path, header: object, data_bytes: int, *, sizes: Mapping[str, int]
) -> tuple[dict[str, FileTensor], dict[str, str]]:
    if not isinstance(header, dict):
        raise _InvalidHeader("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _InvalidHeader(f"its metadata is {show(metadata)} instead of strings")
    tensors, parts = {}, []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [first, last], **others} if not others:
                pass
            case _:
                raise _InvalidHeader(f"its header has no valid entry for {printable(name, 100)}")
        if dtype not in sizes:
            floats = either([*sizes])
            got = f"{printable(name, 100)} is {printable(dtype, 20)}"
            raise _InvalidHeader(f"{got} instead of {floats}, perhaps quantized; start from the unquantized model")
        is_count = all(type(number) is int and number >= 0 for number in (*shape, first, last))
        if not is_count or last - first != math.prod(shape) * sizes[dtype] or math.prod(filter(None, shape)) > _MAX_VALUES:
            raise _InvalidHeader(f"its header contradicts itself about {printable(name, 100)}")
        tensors[name] = FileTensor(file, tuple(shape), dtype)
        parts.append((first, last, name))
    end = 0
    for first, last, name in sorted(parts):
        if first != end:
            raise _InvalidHeader(f"{printable(name, 100)} begins at byte {first} instead of {end}")
        end = last
    if end != data_bytes:
        raise _InvalidHeader(f"it has {data_bytes} bytes of weights, and its header {end}: cut short or changed")
    return tensors, metadata


def find_weights(folder: Path, *, quantized: bool = False) -> dict[str, FileTensor]:
    """Return every tensor in the files of a folder; reads only their headers. ``quantized`` is as for :func:`read_header`.

    If there is an index, only the files that it names are read, and each weight must be in the one file that the index gives
    for it. Weights in these files that the index omits are weights too, as in transformers.

    Raises UserError if there are no safetensors files, a file is a link out of the folder, or files that the index names are
    missing, unreadable or contradict it; lists all such files.
    """
    weight_map = _read_index(folder)
    files = [file_inside(folder, SINGLE)] if weight_map is None else sorted(set(weight_map.values()))
    if absent := [f"{file.name} is {irregular(file) or 'missing'}" for file in files if not file.is_file()]:
        raise UserError(
            f"{folder} must hold its weights as safetensors, but {', '.join(absent)}; "
            "load the model with transformers and write it with save_pretrained"
        )
    if folder / SINGLE not in files and (folder / SINGLE).is_file():  # transformers would read it instead of the index
        message = f"{folder} must hold one model, got {SINGLE} beside {INDEX}, which does not name it"
        raise UserError(f"{message}; remove the one that is not the model")
    found: dict[str, FileTensor] = {}
    wrong, repeated = [], []
    for file in files:
        try:
            tensors, _ = read_header(file, quantized=quantized)
        except UserError as error:
            wrong.append(str(error))
            continue
        repeated += [f"{name} in {found[name].file.name} and in {file.name}" for name in tensors if name in found]
        found |= tensors
    if repeated:
        wrong.append(f"{folder} must hold each weight in one file, got {_first_of(repeated)}; {_REMEDY}")
    mapped = {} if wrong or weight_map is None else weight_map
    lost = [f"{file.name} for {name}" for name, file in mapped.items() if name not in found or found[name].file != file]
    if lost:
        message = f"{folder / INDEX} must name the file of each weight, got {_first_of(lost)}, which it does not hold"
        wrong.append(f"{message}; {_REMEDY}")
    if wrong:
        raise UserError("\n  ".join(wrong))
    return found


def has_own_output(folder: Path, options: Mapping[str, tuple[str, ...]] = {}) -> bool:
    """Return whether a folder has an output weight whose values are not those of the embedding.

    transformers then uses it, even if config.json ties the two. False if there are no weights, or they cannot be read.
    ``options`` are the family's ``prefixes``.
    """
    with contextlib.suppress(UserError):
        found = find_weights(folder, quantized=True)
        prefixes = prefixes_of(found, options)
        embedding, output = (name_in_file(name, prefixes) for name in (EMBEDDING_WEIGHT, OUTPUT_WEIGHT))
        if embedding in found and output in found:
            first, second = (_values(found[name].file, name) for name in (embedding, output))
            starts = range(0, len(first[1]), _COMPARED_BYTES)
            parts = (slice(start, start + _COMPARED_BYTES) for start in starts)
            return first[0] != second[0] or any(bytes(first[1][part]) != bytes(second[1][part]) for part in parts)
    return False


def _values(file: Path, name: str) -> tuple[tuple[str, list[int]], memoryview]:
    """Return dtype and shape of a tensor of a valid file, and its bytes, which are read when they are used."""
    with file.open("rb") as handle:
        content = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(bytes(content[8:start]))[name]
    first, last = entry["data_offsets"]
    return (entry["dtype"], entry["shape"]), content[start + first : start + last]


def _first_of(mistakes: Sequence[str]) -> str:
    return mistakes[0] if len(mistakes) == 1 else f"{len(mistakes)} mistakes, such as {mistakes[0]}"


def is_our_model(folder: Path) -> bool:
    """Return whether this program wrote the folder."""
    try:
        return read_json(folder / INDEX)["metadata"]["written_by"] == WRITTEN_BY
    except (UserError, LookupError, TypeError):
        return False


def _read_index(folder: Path) -> dict[str, Path] | None:
    """Return the file of each weight that the index names; None for a model in a single file, which has no index."""
    index = folder / INDEX
    if not index.is_file():
        return None
    files = read_json(file_inside(folder, INDEX)).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index} must have a weight_map from the name of each weight to its file; {_REMEDY}")
    paths = {file: file_inside(folder, file) for file in set(files.values())}
    return {name: paths[file] for name, file in files.items()}


def write_shards(weights: Iterable[tuple[str, Tensor]], folder: Path, *, max_shard_bytes: int) -> None:
    """Write weights into safetensors files in an existing folder, and their index; memory holds one file's weights.

    A file is closed before it would exceed ``max_shard_bytes``, unless a single weight is larger.
    """
    from safetensors.torch import save_file

    parts: list[list[str]] = []  # names of the weights in each file
    total_bytes = 0
    for shard in _shards(weights, max_shard_bytes):
        save_file(shard, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    weight_map = {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    metadata = {"total_size": total_bytes, "written_by": WRITTEN_BY}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in weights:
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard.clear()  # the caller still has the dictionary
            shard_bytes = 0
        shard[name] = tensor.contiguous()
        shard_bytes += tensor.nbytes
    if shard:
        yield shard
