"""Import of weights from a Hugging Face folder and export to one, at any layout."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.config_fields import Quantization, read_quantization
from nemo_kto.architecture.config_file import CONFIG, read_config
from nemo_kto.architecture.family import name_in_file, prefixes_of
from nemo_kto.architecture.mappings import MTP_LAYERS
from nemo_kto.architecture.segments import Piece, pieces, place_in_file
from nemo_kto.checkpoint.sharded_state import dtype_name
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, show
from nemo_kto.huggingface.export_folder import write_together
from nemo_kto.huggingface.quantized import UNUSED_SCALES, StoredWeight, separate_experts, stored_weights
from nemo_kto.huggingface.rank_weights import (
    Weight,
    differences,
    frozen_weights,
    gather_weights,
    has_first_copy,
    rank_weights,
    wanted_weights,
)
from nemo_kto.layers.quantized_weight import QuantizedWeight
from nemo_kto.layers.weight_formats import Quantized, quantize
from nemo_kto.mixers.param_mapping import Split
from nemo_kto.model_files.companion_files import copy_companions, model_config, with_dtype
from nemo_kto.model_files.safetensors_files import (
    FLOATS,
    OUTPUT_WEIGHT,
    Shapes,
    find_weights,
    has_own_output,
    is_our_model,
    write_shards,
)
from nemo_kto.models.lora.adapters import adapted_layers

_UNUSED = re.compile(r"\.rotary_emb\.inv_freq$")  # a table in old files, which is computed here and in transformers


@dataclass(frozen=True, kw_only=True)
class SourceWeights:
    """Weights of a Hugging Face folder: each of them is trained, copied to exports, or left out of them."""

    architecture: Architecture  # with the mappings to these files
    trained: Mapping[str, StoredWeight]  # by their names in the table of the family
    copied: Mapping[str, Sequence[StoredWeight]]  # by their kind
    left_out: Mapping[str, int]  # number by kind
    prefixes: Mapping[str, str]  # beginnings of names in the table -> in the files
    quantization: Quantization | None

    def describe(self, trained: str = "trained") -> str:
        """Return the numbers of weights of each kind, the first one as ``trained``; empty if all are stored as floats."""
        if self.quantization is None and not any(self.copied.values()):
            return ""
        kinds = [f"{len(weights):,} {kind}" for kind, weights in self.copied.items() if weights]
        count = sum(map(len, self.copied.values()))
        texts = [f"{len(self.trained):,} {trained}", *([f"{count:,} copied ({', '.join(kinds)})"] if kinds else [])]
        texts += [f"{number:,} left out ({kind})" for kind, number in self.left_out.items() if number]
        return ", ".join([*texts, *([] if self.quantization is None else [f"dequantized from {self.quantization}"])])


def load_weights(chunks: Sequence[nn.Module], architecture: Architecture, folder: str | Path) -> None:
    """Fill this rank's parameters from the safetensors of a Hugging Face folder, before an optimizer copies them.

    Adapters are unchanged. Raises UserError as :func:`check_weights`, or if a value is not finite.
    """
    weights = check_weights(architecture, folder)
    read_weights(rank_weights(chunks, weights.architecture), weights.architecture, weights.trained)


def check_weights(architecture: Architecture, folder: str | Path) -> SourceWeights:
    """Compare the weights in a folder with the architecture, by the headers of the files.

    Raises UserError if weights are missing, unexpected or of another shape, a constant has a value that is not supported, or
    files cannot be read.
    """
    folder, family = Path(folder), architecture.family
    quantization = read_quantization(read_config(folder))
    found = find_weights(folder, quantized=quantization is not None)
    stored, problems = stored_weights(found, quantization)
    prefixes = prefixes_of(found, family.prefixes)
    left_out = {"rotary tables": {name for name in stored if _UNUSED.search(name)}, "copy of the embedding": set[str]()}
    left_out["unused scales"] = {name for name in found.keys() - stored.keys() if name.endswith(UNUSED_SCALES)}
    output = name_in_file(OUTPUT_WEIGHT, prefixes)
    if architecture.tied and output in stored and not has_own_output(folder, family.prefixes):
        left_out["copy of the embedding"].add(output)  # some files have a second copy of the embedding
    model = re.escape(prefixes.get("model.", "model."))
    copied: dict[str, list[StoredWeight]] = {}
    for kind, pattern in family.untrained.items():
        names = re.compile(pattern.replace("{model}", model).replace("{layers}", str(architecture.num_layers)))
        copied[kind] = [weight for name, weight in stored.items() if names.match(name)]
    of_text = found.keys() - {each.name for group in copied.values() for each in group}
    architecture = _with_joined_experts(architecture, of_text)
    wanted = {name_in_file(name, prefixes): shape for name, shape in wanted_weights(architecture).items()}
    if family.either_order:
        stored |= _turned(stored, wanted)
    joined = {mapping.split: mapping for mapping in family.mappings if mapping.joins_experts}
    if joined and Split.INTERLEAVED not in joined:
        whole = separate_experts(stored, wanted, transposed=joined[Split.GATED].transposed)
        used = {part.name for experts in whole.values() for row in experts.parts for part in row}
        stored = {name: weight for name, weight in stored.items() if name not in used} | whole
    known = {weight.name for weights in copied.values() for weight in weights}.union(*left_out.values())
    count, differing = differences(wanted, {name: weight.shape for name, weight in stored.items()}, known)
    problems += [
        f"{name}: expected floats, got {dtype}"
        for name in wanted.keys() & stored.keys()
        if stored[name].quantization is None and (dtype := stored[name].tensors[""].dtype) not in FLOATS
    ]
    needs_all = bool(family.text_type or family.chosen_keys)  # in other families, transformers has a default for them
    if needs_all and (empty := [kind for kind in copied if kind not in MTP_LAYERS and not copied[kind]]):
        problems.append(f"missing: every weight of the {empty[0]}")
    if differ := count + len(problems):
        wanted_from = f"those of config.json ({family.hf_architecture})"
        message = f"{folder}: the weights must be {wanted_from}, got {differ} differences:"
        remedy = f"download the model again, or write it with save_pretrained of {family.hf_architecture}"
        raise UserError("\n  ".join([message, *problems, *differing, remedy]))
    _check_constants([weight for weights in copied.values() for weight in weights], family.constants)
    return SourceWeights(
        architecture=architecture,
        trained={name: stored[name_in_file(name, prefixes)] for name in wanted_weights(architecture)},
        copied=copied,
        left_out={kind: len(names) for kind, names in left_out.items()},
        prefixes=prefixes,
        quantization=quantization,
    )


def _check_constants(weights: Iterable[StoredWeight], constants: Mapping[str, float]) -> None:
    """Raise UserError if a weight differs from the value in ``Family.constants`` by more than the rounding of fp16."""
    with _Files() as opened:
        for end, value in constants.items():
            for weight in (each for each in weights if each.name.endswith(end)):
                got = opened(weight.file).get_tensor(weight.name)
                if not bool((got.half() == torch.tensor(value).half()).all()):
                    message = f"{weight.file}: {weight.name} must be {value}, got {show(got.tolist())}"
                    raise UserError(f"{message}; choose another model")


def _with_joined_experts(architecture: Architecture, names: Iterable[str]) -> Architecture:
    """Return the architecture with the mappings of joined experts if a folder with weights of these names has such."""
    joined = {mapping.mcore_name: mapping for mapping in architecture.family.joined}
    ends = tuple(name.split("{layer}")[1] for mapping in joined.values() for name in mapping.hf_names)
    if not any(name.endswith(ends) for name in names):
        return architecture
    mappings = tuple(joined.get(mapping.mcore_name, mapping) for mapping in architecture.family.mappings)
    return replace(architecture, family=replace(architecture.family, mappings=mappings))


def _turned(stored: Mapping[str, StoredWeight], wanted: Shapes) -> dict[str, StoredWeight]:
    """Return the joined experts that a folder has transposed; as in transformers, those with the wanted shape are not."""
    found = {name: stored[name] for name, shape in wanted.items() if name in stored and len(shape) == 3}
    return {
        name: replace(weight, shape=wanted[name], swapped=True)
        for name, weight in found.items()
        if weight.shape != wanted[name] and weight.shape == (wanted[name][0], *wanted[name][:0:-1])
    }


def read_weights(weights: Iterable[Weight], architecture: Architecture, files: Mapping[str, StoredWeight]) -> None:
    """Fill parameters of this rank from ``files``, by name in the table; weights without a file keep their values.

    Files are opened one after the other, and only the slices that this rank holds are read, so that memory holds the model
    and one slice. Values are converted to the dtype of the parameters. Padding is set to zero. Raises UserError if a value
    is not finite.
    """
    wanted: dict[Path, list[tuple[StoredWeight, Weight, Piece]]] = defaultdict(list)
    for weight in weights:
        rank = dist.get_rank(state.tensor_group(of_expert=weight.mapping.of_expert))
        for piece in pieces(weight.parameter.data, weight.mapping, architecture, rank=rank):
            name = list(weight.mapping.hf_names)[piece.source].format(**weight.place)
            if name in files:
                wanted[files[name].file].append((files[name], weight, piece))
    for file in sorted(wanted):
        with _Files() as opened, torch.no_grad():
            for stored, weight, piece in wanted[file]:
                piece.place.copy_(_values(stored, opened, weight, piece))
                if not math.isfinite(float(piece.place.sum())):
                    text = f"{stored.name} must have finite values, got NaN or infinity"
                    raise UserError(f"{file}: {text}; download the model again")


def _values(stored: StoredWeight, opened: _Files, weight: Weight, piece: Piece) -> Tensor:
    """Return the values of a piece, for a quantized weight quantized."""
    mapping, place = weight.mapping, piece.place

    def read(where: tuple[slice, ...]) -> Tensor:
        values = stored.read(opened, place_in_file(mapping, weight.place, where))
        return values.T if mapping.transposed else values

    if not isinstance(place, QuantizedWeight):
        return read(piece.where)
    in_file = place_in_file(mapping, weight.place, piece.where)
    quantized = stored.read_codes(opened, in_file, place.form, transposed=mapping.transposed)
    if quantized is None:
        # whole blocks of the file, so that scales do not depend on the layout
        rows, *columns = piece.where
        size, height = stored.shape[-1 if mapping.transposed else -2], place.form.block[0]
        start, stop, step = rows.indices(size)
        first, last = start // height * height, min(-(-stop // height) * height, size)
        whole = quantize(read((slice(first, last), *columns)).to(place.device), place.form)
        quantized = Quantized(*(part[start - first : stop - first : step] for part in whole))
    return QuantizedWeight(quantized, place.form, place.dtype)


class _Files(ExitStack):
    """Safetensors files that are opened when they are needed, until the block ends."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def __call__(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._opened[file]


def export(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    *,
    source: str | Path,
    out: str | Path,
    max_shard_bytes: int,
    original: str | Path | None = None,
    base: Path | None = None,
    describe: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write the model as a Hugging Face folder that transformers loads without conversion. All ranks must call it.

    The ranks with the first copy of the model send one weight at a time to rank 0, which writes; the others wait. The folder
    appears under its name when it is complete. An earlier export of this program in its place is replaced; anything else
    there is an error. Adapters are left out; call ``models.lora.merge_adapters`` first to merge them into the weights.
    Configuration, tokenizer, chat template and license are copied from ``source``, the folder of the original model, and
    weights that are not trained from ``original``, by default the same folder, one at a time and unchanged unless they are
    quantized; frozen parameters get their dtype in it. In the place of quantized parameters, the weights in the folder
    ``base`` are written, with the adapters merged into them. ``describe`` is called on rank 0 with the folder when all else
    is in it; it adds the model card.

    Raises, on every rank:
        UserError: something else is in the way at ``out``, or a weight is not finite.
        RuntimeError: rank 0 could not write; gives the reason.
    """
    source, target, dtype = Path(source), Path(out), dtype_name(chunks)
    weights: SourceWeights | None = None

    def check_source() -> None:
        nonlocal weights
        if not (source / CONFIG).is_file():
            text = f"the source of an export must be a Hugging Face folder, but {source} has no config.json"
            raise UserError(f"{text}; put it back there")
        if base is not None:
            check_weights(architecture, base)
        if architecture.family.needs_original:
            weights = check_weights(architecture, source if original is None else original)

    def write(folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        whole = stream
        if weights is not None:
            whole = _as_stored(stream, weights, architecture, getattr(torch, dtype))
        write_shards(whole, folder, max_shard_bytes=max_shard_bytes)
        config = with_dtype(model_config(source, tied=architecture.tied), dtype)
        if not architecture.family.config_type:
            config["model_type"] = architecture.family.name  # not an alias, which transformers does not know
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_companions(source, folder)
        describe(folder)

    write_together(
        "export to Hugging Face",
        target=target,
        is_ours=is_our_model,
        prepare=check_source,
        stream=lambda: gather_weights(
            rank_weights(chunks, architecture) if base is None else _merged_weights(chunks, architecture, base),
            architecture if weights is None else weights.architecture,
        ),
        write=write,
    )


def _merged_weights(chunks: Sequence[nn.Module], architecture: Architecture, base: Path) -> Iterator[Weight]:
    """Yield this rank's weights, for quantized ones that it sends those of a folder with their adapters merged into them."""
    files = check_weights(architecture, base)
    mappings = {mapping.mcore_name: mapping for mapping in files.architecture.family.mappings}
    adapters = {id(adapter.weight): adapter for adapter in adapted_layers(chunks)}
    for weight in rank_weights(chunks, architecture):
        quantized, is_sent = weight.parameter, has_first_copy(of_expert=weight.mapping.of_expert)
        if not isinstance(quantized, QuantizedWeight) or not is_sent:
            yield weight
            continue
        dense = torch.empty(quantized.shape, dtype=quantized.dtype, device=quantized.device)
        whole = replace(weight, parameter=dense, mapping=mappings[weight.mapping.mcore_name])
        read_weights([whole], files.architecture, files.trained)
        if id(quantized) in adapters:
            adapters[id(quantized)].merge_into(dense)
        yield replace(weight, parameter=dense)


def _as_stored(
    stream: Iterator[tuple[str, Tensor]], weights: SourceWeights, architecture: Architecture, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names and in the order of the source, then those that are copied from it.

    Weights that are never trained have their dtype in the source; copied ones are unchanged, quantized ones of ``dtype``.
    """
    frozen = frozen_weights(architecture)
    for name, tensor in stream:
        stored = weights.trained[name]
        if name in frozen:
            with _Files() as opened:
                tensor = tensor.to(stored.read(opened).dtype)
        yield stored.name, tensor.mT if stored.swapped else tensor
    for stored in (each for group in weights.copied.values() for each in group):
        with _Files() as opened:
            values = opened(stored.file).get_tensor(stored.name) if stored.quantization is None else stored.read(opened)
            yield stored.name, values if stored.quantization is None else values.to(dtype)


def export_bytes(architecture: Architecture, dtype: torch.dtype, original: Path | None) -> int:
    """Return the size of the weights of an export, with those that are copied from the ``original`` folder."""
    shapes = [*wanted_weights(architecture).values()]
    if original is not None:
        copied = check_weights(architecture, original).copied
        shapes += [weight.shape for weights in copied.values() for weight in weights]
    return sum(map(math.prod, shapes)) * dtype.itemsize
