"""Import of weights from a Hugging Face folder and export to one, at any layout."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.architecture.segments import Piece, pieces, place_in_file
from nemo_kto.artifacts.content import copy_companions, model_config, with_dtype
from nemo_kto.artifacts.safetensors_files import (
    BLOCKS,
    OUTPUT_WEIGHT,
    SCALES,
    Shapes,
    find_weights,
    has_own_output,
    is_our_model,
    write_shards,
)
from nemo_kto.checkpoint.model_state import dtype_name
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.huggingface.folders import write_together
from nemo_kto.huggingface.mapping import Weight, differences, rank_weights, wanted_weights
from nemo_kto.huggingface.stream import gather_weights

_UNUSED = re.compile(r"\.rotary_emb\.inv_freq$")  # a table in old files, which is computed here and in transformers
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))  # the highest of the four bits is the sign
_BIAS, _NO_NUMBER = 127, 255


def load_weights(chunks: Sequence[nn.Module], architecture: Architecture, folder: str | Path) -> None:
    """Fill this rank's parameters from the safetensors of a Hugging Face folder, before an optimizer copies them.

    Adapters are unchanged. Raises UserError as :func:`check_weights`, or if a value is not finite.
    """
    files = check_weights(architecture, folder)
    read_weights(rank_weights(chunks, architecture), architecture, files)


def check_weights(architecture: Architecture, folder: str | Path) -> dict[str, Path]:
    """Compare the weights in a folder with the architecture, by the headers of the files, and return the file of each.

    Raises UserError if weights are missing, unexpected or of another shape, or files cannot be read.
    """
    found = find_weights(Path(folder))
    ignored = {name for name in found if _UNUSED.search(name)}
    if architecture.tied and not has_own_output(Path(folder)):  # some files have a second copy of the embedding
        ignored.add(OUTPUT_WEIGHT)
    shapes = dequantized_shapes({name: shape for name, (_, shape) in found.items()})
    count, problems = differences(wanted_weights(architecture), shapes, ignored)
    if problems:
        message = (
            f"{folder}: the weights must be those of config.json ({architecture.family.hf_architecture}), "
            f"got {count} differences:"
        )
        remedy = f"download the model again, or write it with save_pretrained of {architecture.family.hf_architecture}"
        raise UserError("\n  ".join([message, *problems, remedy]))
    return {name: file for name, (file, _) in found.items()}


def read_weights(weights: Iterable[Weight], architecture: Architecture, files: Mapping[str, Path]) -> None:
    """Fill parameters of this rank from ``files`` (name of a weight -> its file); weights without a file keep their values.

    Files are opened one after the other, and only the slices that this rank holds are read, so that memory holds the model
    and one slice. MXFP4 weights are dequantized, and values converted to the dtype of the parameters. Padding is set to
    zero. Raises UserError if a value is not finite.
    """
    wanted: dict[Path, list[tuple[str, Weight, Piece]]] = defaultdict(list)
    for weight in weights:
        rank = dist.get_rank(state.tensor_group(of_expert=weight.mapping.of_expert))
        for piece in pieces(weight.parameter.data, weight.mapping, architecture, rank=rank):
            name = list(weight.mapping.hf_names)[piece.source].format(**weight.place)
            if (found := name if name in files else name + BLOCKS) in files:
                wanted[files[found]].append((name, weight, piece))
    for file in sorted(wanted):
        with safe_open(file, framework="pt") as handle, torch.no_grad():
            for name, weight, piece in wanted[file]:
                if name in files:
                    values = handle.get_slice(name)[place_in_file(weight.mapping, weight.place, piece.where)]
                    piece.place.copy_(values.T if weight.mapping.transposed else values)
                else:
                    piece.place.copy_(_dequantized(name, weight, piece, files))
                if not math.isfinite(float(piece.place.sum())):
                    raise UserError(f"{file}: {name} must have finite values, got NaN or infinity; download the model again")


def _dequantized(name: str, weight: Weight, piece: Piece, files: Mapping[str, Path]) -> Tensor:
    """Return a piece of a matrix stored in MXFP4, whose blocks and scales may be in different files."""
    rows, *columns = piece.where
    packed = []
    for part in (name + BLOCKS, name + SCALES):
        with safe_open(files[part], framework="pt") as handle:
            packed.append(handle.get_slice(part)[weight.place["expert"], rows])
    of_rows, where = dequantize(*packed), (slice(None), *columns)
    return of_rows[where]


def export(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    *,
    source: str | Path,
    out: str | Path,
    max_shard_bytes: int,
    describe: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write the model as a Hugging Face folder that transformers loads without conversion. All ranks must call it.

    The ranks with the first copy of the model send one weight at a time to rank 0, which writes; the others wait. The folder
    appears under its name when it is complete. An earlier export of this program in its place is replaced; anything else
    there is an error. Adapters are left out; call ``models.lora.merge_adapters`` first to merge them into the weights.
    Configuration, tokenizer, chat template and license are copied from ``source``, the folder of the original model.
    ``describe`` is called on rank 0 with the folder when all else is in it; it adds the model card.

    Raises, on every rank:
        UserError: something else is in the way at ``out``, or a weight is not finite.
        RuntimeError: rank 0 could not write; gives the reason.
    """
    source, target = Path(source), Path(out)

    def check_source() -> None:
        if not (source / CONFIG).is_file():
            text = f"the source of an export must be a Hugging Face folder, but {source} has no config.json"
            raise UserError(f"{text}; put it back there")

    def write(folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        write_shards(stream, folder, max_shard_bytes=max_shard_bytes)
        config = with_dtype(model_config(source, tied=architecture.tied), dtype_name(chunks))
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_companions(source, folder)
        describe(folder)

    write_together(
        "export to Hugging Face",
        target=target,
        is_ours=is_our_model,
        prepare=check_source,
        stream=lambda: gather_weights(rank_weights(chunks, architecture), architecture),
        write=write,
    )


def export_bytes(architecture: Architecture, dtype: torch.dtype) -> int:
    """Return the size of the weights of an export."""
    return sum(map(math.prod, wanted_weights(architecture).values())) * dtype.itemsize


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize blocks [..., out, in / 32, 16] and scales [..., out, in / 32] to fp32 [..., out, in]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor(_VALUES)[codes.long()]
    exponents = scales.to(torch.int32)
    factors = torch.ldexp(torch.ones(scales.shape), exponents - _BIAS).masked_fill_(exponents == _NO_NUMBER, torch.nan)
    return (values * factors.unsqueeze(-1)).flatten(-2)


def dequantized_shapes(shapes: Shapes) -> Shapes:
    """Replace the entries of blocks and scales by those of the tensors they encode, unless the file has these tensors too.

    Other names and shapes are kept.
    """
    found = dict(shapes)
    for name in [name.removesuffix(BLOCKS) for name in shapes if name.endswith(BLOCKS)]:
        match shapes[name + BLOCKS], shapes.get(name + SCALES):
            case (experts, rows, groups, 16), (*of_scales,) if of_scales == [experts, rows, groups] and name not in shapes:
                del found[name + BLOCKS], found[name + SCALES]
                found[name] = (experts, 32 * groups, rows)
    return found
