"""Weights from a Hugging Face folder into the model, and the model out into a Hugging Face folder, at any layout."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor, nn

from nemo_kto.checkpoint.mapping import Weight, rank_weights, wanted_weights
from nemo_kto.checkpoint.safetensors_files import INDEX, ShardWriter, find_weights
from nemo_kto.models.architecture import Architecture
from nemo_kto.models.segments import pieces, segments, split_dimension

_WRITTEN_BY = "nemo_kto"
# What transformers, and the engines that serve its models, read beside the weights and config.json.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """Values to read: the slice ``where`` of the weight ``name`` belongs into ``place``, a view of a parameter."""

    name: str
    where: tuple[slice, ...]
    place: Tensor


def load_weights(chunks: Sequence[nn.Module], architecture: Architecture, folder: str | Path) -> None:
    """Fill this rank's parameters from the safetensors of a Hugging Face folder.

    Files are opened one after the other, and of each only the slices that this rank holds are read, so that memory holds the
    model and one slice. Values are converted to the dtype of the parameters. Padding becomes zero.

    Args:
        chunks: this rank's model chunks, wrapped or not; before an optimizer copies their parameters.
        architecture: what they were built from.
        folder: the Hugging Face folder.

    Raises:
        FileNotFoundError: the folder has no safetensors, or not all of them.
        ValueError: weights are missing, unexpected or of another shape; lists all of them, on every rank alike.
    """
    found = find_weights(Path(folder))
    _check_weights(found, architecture, Path(folder))
    copies: dict[Path, list[_Copy]] = defaultdict(list)
    for weight in rank_weights(chunks, architecture):
        for copy in _copies(weight, architecture):
            copies[found[copy.name][0]].append(copy)
    for file in sorted(copies):
        with safe_open(file, framework="pt") as handle, torch.no_grad():
            for copy in copies[file]:
                copy.place.copy_(handle.get_slice(copy.name)[copy.where])


def export(
    chunks: Sequence[nn.Module], architecture: Architecture, *, source: str | Path, out: str | Path, max_shard_bytes: int
) -> None:
    """Write the model as a Hugging Face folder that transformers loads as it is. All ranks must call it.

    The ranks of the first copy of the model send one weight at a time to rank 0, which writes; the others wait. The folder
    appears under its name when it is complete. An earlier export of ours in its place is replaced; anything else there is an
    error.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        architecture: what they were built from.
        source: the folder the model came from; its configuration, tokenizer and chat template are copied.
        out: the folder to write.
        max_shard_bytes: size limit of a weight file.

    Raises:
        RuntimeError: rank 0 could not write; says why, on every rank alike.
    """
    first_rank = dist.get_rank() == 0
    target, partial = Path(out), Path(out).with_name(f"{Path(out).name}.partial")
    _raise_together(_prepare(Path(source), target, partial) if first_rank else None)
    problem = None
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        stream = _gather(chunks, architecture)
        if first_rank:
            problem = _write(stream, partial, max_shard_bytes)
        for _ in stream:  # the other ranks' part; and rank 0's too if it failed, or the others would wait for it
            pass
    if first_rank and problem is None:
        problem = _attempt(lambda: _publish(Path(source), target, partial, chunks))
    _raise_together(problem)


def _check_weights(found: dict[str, Any], architecture: Architecture, folder: Path) -> None:
    wanted = wanted_weights(architecture)
    # Old files hold the rotary table, which is computed, and some a second copy of a tied embedding.
    ignored = {
        name for name in found if name.endswith(".rotary_emb.inv_freq") or (architecture.tied and name == "lm_head.weight")
    }
    problems = [f"missing: {name}" for name in wanted if name not in found]
    problems += [f"unexpected: {name}" for name in found if name not in wanted and name not in ignored]
    problems += [
        f"{name}: expected shape {list(shape)}, got {list(found[name][1])}"
        for name, shape in wanted.items()
        if name in found and found[name][1] != shape
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(
            f"{folder}: the weights must be those that config.json ({architecture.family.hf_architecture}) asks for, "
            f"got {len(problems)} differences:\n  {listed}"
        )


def _copies(weight: Weight, architecture: Architecture) -> Iterator[_Copy]:
    """What to read into a parameter. Its padding is set to zero here and now."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for piece in pieces(weight.parameter.data, weight.row, architecture, rank=rank):
        yield _Copy(name=weight.sources[piece.source], where=piece.where, place=piece.place)


def _gather(chunks: Sequence[nn.Module], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """On rank 0, every weight of the model under its Hugging Face name; on the others, nothing, while they send theirs."""
    mine = [weight for weight in rank_weights(chunks, architecture) if not weight.copied]
    leads = parallel_state.get_tensor_model_parallel_rank() == 0
    stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    first_stage = parallel_state.get_pipeline_model_parallel_rank() == 0
    for weight in mine:
        whole = _gather_tensor_parallel(weight)
        if leads and first_stage:
            yield from _theirs(weight.row, weight.layer, whole, architecture)
        elif leads:
            dist.send_object_list([(weight.row.ours, weight.layer, whole.shape)], dst=stages[0], group=_pipeline())
            dist.send(whole, dst=stages[0], group=_pipeline())
    if not leads:
        return
    if not first_stage:
        dist.send_object_list([None], dst=stages[0], group=_pipeline())
        return
    rows = {row.ours: row for row in architecture.family.rows}
    for stage in stages[1:]:
        while (header := _receive_header(stage)) is not None:
            ours, layer, shape = header
            whole = torch.empty(shape, dtype=mine[0].parameter.dtype, device=mine[0].parameter.device)
            dist.recv(whole, src=stage, group=_pipeline())
            yield from _theirs(rows[ours], layer, whole, architecture)


def _pipeline() -> Any:
    return parallel_state.get_pipeline_model_parallel_group()


def _receive_header(stage: int) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=stage, group=_pipeline())
    return box[0]


def _gather_tensor_parallel(weight: Weight) -> Tensor:
    """On the first rank of a tensor-parallel group, its ranks' shards put together; on the others, their own shard."""
    shard, dimension = weight.parameter.data, split_dimension(weight.row)
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if dimension is None or len(ranks) == 1:
        return shard.contiguous()
    shards = [torch.empty_like(shard) for _ in ranks] if dist.get_rank() == ranks[0] else None
    dist.gather(shard.contiguous(), shards, dst=ranks[0], group=group)
    return torch.cat(shards, dim=dimension) if shards else shard


def _theirs(row: Any, layer: int | None, whole: Tensor, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Take the Hugging Face weights out of one of our parameters."""
    dimension = split_dimension(row)
    parts = [] if dimension is None else segments(row, architecture)
    for source, (name, sizes) in enumerate(row.theirs.items()):
        if dimension is None or len(parts) == 1:
            yield name.format(layer=layer), whole.cpu()
            continue
        values = torch.empty([architecture.sizes[size] for size in sizes], dtype=whole.dtype)
        position = 0
        for part in parts:
            if part.source == source:
                values.narrow(dimension, part.start, part.length).copy_(whole.narrow(dimension, position, part.length))
            position += part.length
        yield name.format(layer=layer), values


def _write(stream: Iterator[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> str | None:
    writer = ShardWriter(folder=folder, max_shard_bytes=max_shard_bytes)

    def write() -> None:
        for name, tensor in stream:
            writer.add(name, tensor)
        writer.close(mark=_WRITTEN_BY)

    return _attempt(write)


def _prepare(source: Path, target: Path, partial: Path) -> str | None:
    if not (source / "config.json").is_file():
        return f"the source of an export must be a Hugging Face folder, but {source} has no config.json"
    if target.exists() and not _is_ours(target):
        return f"{target} exists and is no earlier export; remove it or export to another folder"

    def make() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # left by an export that was interrupted
        partial.mkdir(parents=True)

    return _attempt(make)


def _is_ours(folder: Path) -> bool:
    if folder.is_dir() and not any(folder.iterdir()):
        return True
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return index.get("metadata", {}).get("written_by") == _WRITTEN_BY


def _publish(source: Path, target: Path, partial: Path, chunks: Sequence[nn.Module]) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")
    config.pop("dtype", None)  # newer name of the same key; both old and new transformers read the older one
    config["torch_dtype"] = dtype
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in _COMPANIONS:
        if (source / name).is_dir():
            shutil.copytree(source / name, partial / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    if target.exists():
        replaced = target.with_name(target.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)


def _attempt(action: Callable[[], None]) -> str | None:
    """Do it; what went wrong as text, because the other ranks must hear of it before anybody leaves."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _raise_together(problem: str | None) -> None:
    """Raise rank 0's problem on every rank; also waits until rank 0 is here."""
    box = [problem]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise RuntimeError(f"export to Hugging Face failed: {box[0]}")
