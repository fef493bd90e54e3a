"""Weights as files store them: in one tensor, or quantized in MXFP4, NVFP4, fp8 or int4 with scales in further tensors.

Only the part of a weight that is needed is read, with the scales of that part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_kto.architecture.config_fields import Quantization
from nemo_kto.layers.layer_settings import FORMATS, BaseFormat
from nemo_kto.layers.weight_formats import Quantized, dequantize, unpack_e2m1
from nemo_kto.model_files.safetensors_files import FLOATS, FP8, FP8_SCALE, INT32, UINT8, FileTensor

Where = tuple[slice | int, ...]
# Ends of the names of tensors: those of MXFP4, and of compressed-tensors.
_BLOCKS, _SCALES = "_blocks", "_scales"
_MXFP4_VALUES = 32  # that share a scale, two in a byte
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_SCALE_ENDS = ("_scale_inv", _SCALE)  # both are factors on the stored values
# Scales of a whole weight in NVFP4, on those of its groups: a factor in files of ModelOpt, a divisor in compressed-tensors'.
_FACTOR, _DIVISOR = "_scale_2", "_global_scale"
# Scales of activations, in the place of "weight", and of a server's cache of keys and values; not needed.
_OF_ACTIVATIONS = ("activation_scale", "input_scale", "input_global_scale")
_OF_CACHES = (".k_scale", ".v_scale")
UNUSED_SCALES = (*_OF_ACTIVATIONS, *_OF_CACHES)
# Matrices of an expert that the tensor of joined experts with this name has side by side.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PER_WORD, _PER_BYTE = 8, 2  # int4 values in an int32, NVFP4 values in a byte; the first are in the lowest bits
_OFFSET = 8  # stored values are unsigned


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A weight in files."""

    name: str
    tensors: Mapping[str, FileTensor]  # by the ends of their names; the first one has the values
    shape: tuple[int, ...]
    quantization: Quantization | None = None  # None for one tensor of the weight's values
    swapped: bool = False  # the file has the transpose, in the last two dimensions, of the weight with this shape

    @property
    def file(self) -> Path:
        """File with the values."""
        return next(iter(self.tensors.values())).file

    def read(self, opened: Callable[[Path], Any], where: Where = ()) -> Tensor:
        """Return the values of a slice, in fp32 if they are quantized; ``opened`` opens a safetensors file."""
        where = (*where, *[slice(None)] * (len(self.shape) - len(where)))
        if self.swapped:
            where = (*where[:-2], where[-1], where[-2])

        def part(end: str) -> Any:
            return opened(self.tensors[end].file).get_slice(self.name + end)

        values = part("")[where] if self.quantization is None else self._dequantized(part, where)
        return values.mT if self.swapped else values

    def read_codes(
        self, opened: Callable[[Path], Any], where: Where, form: BaseFormat, *, transposed: bool
    ) -> Quantized | None:
        """Return the stored codes and scales of a slice of a matrix; None if its file has another format.

        With ``transposed`` the slice is that of the transpose of the matrix, as for the experts of gpt-oss.
        """
        if self.quantization is None or self.quantization.method != form.name:
            return None
        where = (*where, *[slice(None)] * (len(self.shape) - len(where)))
        if self.swapped:
            in_file = replace(self, shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]), swapped=False)
            return in_file.read_codes(opened, (*where[:-2], where[-1], where[-2]), form, transposed=not transposed)

        def part(end: str) -> Any:
            return opened(self.tensors[end].file).get_slice(self.name + end)

        if form.name == "mxfp4":
            *first, columns, rows = where
            assert isinstance(columns, slice)
            start, stop, _ = columns.indices(self.shape[-2])
            blocks = (*first, rows, slice(start // _MXFP4_VALUES, stop // _MXFP4_VALUES))
            return Quantized(part(_BLOCKS)[blocks].flatten(-2), part(_SCALES)[blocks]) if transposed else None
        codes, block = part("")[where], self.quantization.block
        scales = self._factors(part, where, self.shape).expand_as(codes)
        if transposed:
            codes, scales, block = codes.T, scales.T, block[::-1]
        if block[1] is not None and block[1] % form.block[1]:
            return None
        return Quantized(codes.view(torch.uint8), scales[:, :: form.block[1]])

    def _dequantized(self, part: Callable[[str], Any], where: Where) -> Tensor:
        """Return the values of a slice of a quantized weight, given in the order of the file."""
        assert self.quantization is not None
        *first, rows, columns = where
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.swapped else self.shape
        assert isinstance(columns, slice)
        if self.quantization.method == "mxfp4":
            # the file has [..., out, in]
            blocks, scales = (part(end)[(*first, columns)] for end in (_BLOCKS, _SCALES))
            return dequantize(Quantized(blocks.flatten(-2), scales), FORMATS["mxfp4"]).mT[..., rows, :]
        unpacked = {"int4": (_PER_WORD, unpack_int4), "nvfp4": (_PER_BYTE, unpack_e2m1)}.get(self.quantization.method)
        stored = part(_PACKED if _PACKED in self.tensors else "")
        if unpacked is not None:
            per_item, unpack_items = unpacked
            start, stop, step = columns.indices(shape[-1])
            items = stored[(*first, rows, slice(start // per_item, -(-stop // per_item)))]
            values = unpack_items(items)[..., start % per_item :][..., : stop - start : step]
        else:
            values = stored[where]
        return values.float() * self._factors(part, where, shape)

    def _factors(self, part: Callable[[str], Any], where: Where, shape: tuple[int, ...]) -> Tensor:
        """Return the factors on the values of a slice, in fp32: one, or one for each value."""
        assert self.quantization is not None
        end = next(end for end in _SCALE_ENDS if end in self.tensors)
        is_single = _is_number(self.tensors[end])
        scales = part(end)[...].float().squeeze() if is_single else _scales(part(end), where, shape, self.quantization)
        if _FACTOR in self.tensors:
            return scales * part(_FACTOR)[...].float().squeeze()
        return scales / part(_DIVISOR)[...].float().squeeze() if _DIVISOR in self.tensors else scales


@dataclass(frozen=True, kw_only=True)
class SeparateExperts(StoredWeight):
    """Experts of a layer whose matrices files have one by one, read as the tensor that joins them."""

    parts: Sequence[Sequence[StoredWeight]]  # of each expert: gate and up, or down, which the tensor has side by side
    transposed: bool  # the tensor is [experts, in, out], not [experts, out, in]

    def read_codes(
        self, opened: Callable[[Path], Any], where: Where, form: BaseFormat, *, transposed: bool
    ) -> Quantized | None:
        assert transposed == self.transposed
        found = [part.read_codes(opened, held, form, transposed=False) for part, held in self._held(where)]
        codes, scales = ([part[which] for part in found if part is not None] for which in (0, 1))
        return Quantized(torch.cat(codes), torch.cat(scales)) if len(codes) == len(found) else None

    def read(self, opened: Callable[[Path], Any], where: Where = ()) -> Tensor:
        where = (*where, *[slice(None)] * (len(self.shape) - len(where)))
        if isinstance(expert := where[0], slice):
            return torch.stack([self.read(opened, (each, *where[1:])) for each in range(*expert.indices(self.shape[0]))])
        stacked = torch.cat([part.read(opened, held) for part, held in self._held(where)])
        return stacked.mT if self.transposed else stacked

    def _held(self, where: Where) -> Iterator[tuple[StoredWeight, Where]]:
        """Yield the matrices that a slice of one expert's matrix touches, and the slice of each, as files have it."""
        where = (*where, *[slice(None)] * (len(self.shape) - len(where)))
        expert, (rows, columns) = where[0], where[:0:-1] if self.transposed else where[1:]
        assert isinstance(expert, int)
        assert isinstance(rows, slice)
        first, last, step = rows.indices(sum(part.shape[0] for part in self.parts[expert]))
        assert step == 1
        start = 0
        for part in self.parts[expert]:
            held = slice(max(first - start, 0), min(last - start, part.shape[0]))
            if held.start < held.stop:
                yield part, (held, columns)
            start += part.shape[0]


def separate_experts(
    stored: Mapping[str, StoredWeight], wanted: Mapping[str, tuple[int, ...]], *, transposed: bool
) -> dict[str, SeparateExperts]:
    """Return the tensors of joined experts, of the ``wanted`` weights, for which files have a matrix of each expert."""
    found = {}
    for name, shape in wanted.items():
        block, _, module = name.rpartition(".")
        if module not in _PARTS or name in stored:
            continue
        names = [[f"{block}.{expert}.{part}.weight" for part in _PARTS[module]] for expert in range(shape[0])]
        if not all(each in stored for row in names for each in row):
            continue
        parts = [[stored[each] for each in row] for row in names]
        matrices, *others = {tuple(part.shape for part in row) for row in parts}
        kinds = {part.quantization or part.tensors[""].dtype for row in parts for part in row}
        if not others and len(kinds) == 1 and all(len(matrix) == 2 for matrix in matrices):
            size = (sum(matrix[0] for matrix in matrices), matrices[0][1])
            found[name] = SeparateExperts(
                name=name,
                tensors=parts[0][0].tensors,
                shape=(len(parts), *(size[::-1] if transposed else size)),
                quantization=parts[0][0].quantization,
                parts=parts,
                transposed=transposed,
            )
    return found


def _is_number(tensor: FileTensor | None) -> bool:
    """Return whether there is a tensor of one value."""
    return tensor is not None and math.prod(tensor.shape) == 1


def _scales(part: Any, where: Where, shape: tuple[int, ...], quantization: Quantization) -> Tensor:
    """Return the scale of each value in a slice of a weight of this shape, of whose blocks each has one scale."""
    *first, rows, columns = where
    needed, positions = zip(*map(_blocks_of, (rows, columns), shape[-2:], quantization.block), strict=True)
    return part[(*first, *needed)].float().index_select(-2, positions[0]).index_select(-1, positions[1])


def _blocks_of(where: slice | int, size: int, block: int | None) -> tuple[slice, Tensor]:
    """Return the slice of the blocks that a slice of a dimension touches, and the number of each value's block in it."""
    assert isinstance(where, slice)
    blocks = torch.arange(*where.indices(size)) // (block or size)
    return slice(int(blocks[0]), int(blocks[-1]) + 1), blocks - blocks[0]


def unpack_int4(words: Tensor) -> Tensor:
    """Return the int4 values in int32 words [..., words]: int32 [..., 8 * words]."""
    shifts = torch.arange(0, 32, 32 // _PER_WORD, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2) - _OFFSET


def stored_weights(
    found: Mapping[str, FileTensor], quantization: Quantization | None
) -> tuple[dict[str, StoredWeight], list[str]]:
    """Return the weights that the tensors of a folder store, by name, and a message for each that is incomplete.

    Tensors that belong to no quantized weight are weights themselves.
    """
    weights, problems, used = dict[str, StoredWeight](), list[str](), set[str]()
    if quantization is not None:
        for name in found:
            if (joined := _JOINED[quantization.method](name, found, quantization)) is not None:
                weights[joined.name] = joined
                problems += _problems(joined)
                used |= {joined.name + end for end in joined.tensors}
                base = joined.name.removesuffix("weight")
                used |= {base + "_" * (not base.endswith(".")) + end for end in _OF_ACTIVATIONS}
        used |= {name for name in found if name.endswith(_OF_CACHES)}
    for name in found.keys() - used:
        weights[name] = StoredWeight(name=name, tensors={"": found[name]}, shape=found[name].shape)
    return {name: weights[name] for name in sorted(weights)}, problems


def _mxfp4(name: str, found: Mapping[str, FileTensor], quantization: Quantization) -> StoredWeight | None:
    base = name.removesuffix(_BLOCKS)
    match found[name].shape:
        case (experts, rows, groups, _) if base != name and base not in found:
            tensors = {end: found[base + end] for end in (_BLOCKS, _SCALES) if base + end in found}
            shape = (experts, _MXFP4_VALUES * groups, rows)
            return StoredWeight(name=base, tensors=tensors, shape=shape, quantization=quantization)
    return None


def _fp8(name: str, found: Mapping[str, FileTensor], quantization: Quantization) -> StoredWeight | None:
    if found[name].dtype != FP8:
        return None
    tensors = {"": found[name]} | {end: found[name + end] for end in _SCALE_ENDS if name + end in found}
    return StoredWeight(name=name, tensors=tensors, shape=found[name].shape, quantization=quantization)


def _int4(name: str, found: Mapping[str, FileTensor], quantization: Quantization) -> StoredWeight | None:
    base = name.removesuffix(_PACKED)
    if base == name or found[name].dtype != INT32 or base in found:
        return None
    *first, words = found[name].shape
    tensors = {end: found[base + end] for end in (_PACKED, _SCALE, _SHAPE) if base + end in found}
    return StoredWeight(name=base, tensors=tensors, shape=(*first, words * _PER_WORD), quantization=quantization)


def _nvfp4(name: str, found: Mapping[str, FileTensor], quantization: Quantization) -> StoredWeight | None:
    base = name.removesuffix(_PACKED)
    if found[name].dtype != UINT8 or (base != name and base in found):
        return None
    values, factor = ("", _FACTOR) if base == name else (_PACKED, _DIVISOR)
    *first, packed = (1, *found[name].shape)
    tensors = {end: found[base + end] for end in (values, _SCALE, factor) if base + end in found}
    return StoredWeight(name=base, tensors=tensors, shape=(*first[1:], packed * _PER_BYTE), quantization=quantization)


_JOINED = {"mxfp4": _mxfp4, "nvfp4": _nvfp4, "fp8": _fp8, "int4": _int4}


def _problems(weight: StoredWeight) -> Iterator[str]:
    """Yield a message for each tensor of a quantized weight that is missing, or of another type or shape than it needs."""
    assert weight.quantization is not None
    block, method = weight.quantization.block, weight.quantization.method
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}  # end of a name -> shape and types of the tensor
    *first, rows, columns = (1, 1, *weight.shape)
    if method == "mxfp4":
        blocks = (*weight.shape[:-2], columns, rows // _MXFP4_VALUES)
        wanted = {_BLOCKS: ((*blocks, _MXFP4_VALUES // 2), (UINT8,)), _SCALES: (blocks, (UINT8,))}
    else:
        ends = _SCALE_ENDS if method == "fp8" else (_SCALE,)
        end = next((end for end in ends if end in weight.tensors), ends[0])
        height, width = block[0] or max(1, rows), block[1] or max(1, columns)
        shape: tuple[int, ...] = (*first[2:], -(-rows // height), -(-columns // width))
        if block == (None, None) and _is_number(weight.tensors.get(end)):
            shape = weight.tensors[end].shape
        wanted = {end: (shape, (FP8,) if method == "nvfp4" else (*FLOATS, FP8_SCALE))}
        if method == "nvfp4":
            factor = _DIVISOR if _PACKED in weight.tensors else _FACTOR
            wanted[factor] = (weight.tensors[factor].shape if _is_number(weight.tensors.get(factor)) else (), tuple(FLOATS))
    for end, (shape, types) in wanted.items():
        tensor = weight.tensors.get(end)
        if tensor is None:
            yield f"missing: {weight.name}{end}" + f" or {weight.name}{_SCALE}" * (end == _SCALE_ENDS[0])
        elif tensor.dtype not in types:
            yield f"{weight.name}{end}: expected {'floats' if len(types) > 1 else types[0]}, got {tensor.dtype}"
        elif tensor.shape != shape:
            yield f"{weight.name}{end}: expected shape {list(shape)}, got {list(tensor.shape)}"
