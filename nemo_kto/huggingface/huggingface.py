"""Import of weights from a Hugging Face folder and export to one, at any layout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.artifacts.content import copy_companions
from nemo_kto.artifacts.safetensors_files import WRITTEN_BY, ShardWriter, find_weights, is_our_model
from nemo_kto.checkpoint.model_state import dtype_name
from nemo_kto.errors import UserError
from nemo_kto.huggingface.folders import write_together
from nemo_kto.huggingface.mapping import differences, rank_weights, wanted_weights
from nemo_kto.huggingface.mxfp4 import dequantized_shapes
from nemo_kto.huggingface.stream import gather_weights, read_weights
from nemo_kto.utils.files import file_inside, read_json

_SHOWN = 20  # differences to list; a model of another size differs everywhere


def load_weights(chunks: Sequence[nn.Module], architecture: Architecture, folder: str | Path) -> None:
    """Fill this rank's parameters from the safetensors of a Hugging Face folder, before an optimizer copies them.

    Only the slices that this rank holds are read; adapters are unchanged.

    Raises:
        UserError: as for :func:`check_weights`, or a value is not finite.
    """
    check_weights(architecture, folder)
    files = {name: file for name, (file, _) in find_weights(Path(folder)).items()}
    read_weights(rank_weights(chunks, architecture), architecture, files)


def check_weights(architecture: Architecture, folder: str | Path) -> None:
    """Compare the weights in a folder with those of the architecture; reads only the headers of the files.

    Raises:
        UserError: weights are missing, unexpected or of another shape; lists up to 20. Or the files cannot be read.
    """
    found = find_weights(Path(folder))
    # Some old files hold the rotary table, which is computed here, and some a second copy of a tied embedding.
    ignored = {
        name for name in found if name.endswith(".rotary_emb.inv_freq") or (architecture.tied and name == "lm_head.weight")
    }
    shapes = dequantized_shapes({name: shape for name, (_, shape) in found.items()})
    if problems := differences(wanted_weights(architecture), shapes, ignored):
        message = (
            f"{folder}: the weights must be those of config.json ({architecture.family.hf_architecture}), "
            f"got {len(problems)} differences:"
        )
        shown = problems if len(problems) <= _SHOWN else [*problems[:_SHOWN], f"and {len(problems) - _SHOWN} more"]
        raise UserError("\n  ".join([message, *shown, "download the model again, or write it with save_pretrained"]))


def export(
    chunks: Sequence[nn.Module], architecture: Architecture, *, source: str | Path, out: str | Path, max_shard_bytes: int
) -> None:
    """Write the model as a Hugging Face folder that transformers loads without conversion. All ranks must call it.

    The ranks with the first copy of the model send one weight at a time to rank 0, which writes; the others wait. The folder
    appears under its name when it is complete. An earlier export of this program in its place is replaced; anything else
    there is an error. Adapters are left out; call ``models.lora.merge_adapters`` first to merge them into the weights.

    Args:
        chunks: this rank's model chunks, wrapped or not, built from ``architecture``.
        source: folder of the original model; its configuration, tokenizer and chat template are copied to ``out``.
        max_shard_bytes: size limit of a weight file.

    Raises:
        UserError: something else is in the way at ``out``, or a weight is not finite; gives the reason, on every rank.
        RuntimeError: rank 0 could not write; gives the reason, on every rank.
    """
    source, target = Path(source), Path(out)

    def write(folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        writer = ShardWriter(folder=folder, max_shard_bytes=max_shard_bytes)
        for name, tensor in stream:
            writer.add(name, tensor)
        writer.close(mark=WRITTEN_BY)
        config = _config(source)
        config.pop("dtype", None)  # newer name of torch_dtype; all versions of transformers read the older one
        config["torch_dtype"] = dtype_name(chunks)
        config.pop("quantization_config", None)  # quantized weights were dequantized when they were read
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_companions(source, folder)

    write_together(
        "export to Hugging Face",
        target=target,
        is_ours=is_our_model,
        prepare=lambda: _config(source),
        stream=lambda: gather_weights(rank_weights(chunks, architecture), architecture),
        write=write,
    )


def export_bytes(architecture: Architecture, dtype: torch.dtype) -> int:
    """Return the size of the weights of an export."""
    return sum(map(math.prod, wanted_weights(architecture).values())) * dtype.itemsize


def _config(source: Path) -> dict[str, Any]:
    if not (source / CONFIG).is_file():
        raise UserError(
            f"the source of an export must be a Hugging Face folder, but {source} has no config.json; put it back there"
        )
    return read_json(file_inside(source, CONFIG))
