"""Conversion of checkpoints of other Megatron programs into Hugging Face folders."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.architecture.segments import source_shapes, split_dimension
from nemo_kto.errors import UserError
from nemo_kto.huggingface.export_folder import NewFolder, check_target
from nemo_kto.huggingface.rank_weights import ENGINE_NAMES, FileWeights
from nemo_kto.mixers.param_mapping import ParamMapping, Split
from nemo_kto.model_files.companion_files import copy_companions, with_dtype
from nemo_kto.model_files.safetensors_files import INDEX, is_our_model, write_shards
from nemo_kto.model_files.tokenizer_files import check_tokenizer
from nemo_kto.tools.convert.megatron_checkpoints import MegatronCheckpoint, open_checkpoint
from nemo_kto.tools.convert.megatron_config import compare, derive
from nemo_kto.utils.files import file_inside, read_json

logger = logging.getLogger(__name__)

_LAYER, _EXPERT = "decoder.layers.{layer}.", "mlp.experts.local_experts.{expert}."
# Our names in a layer -> other names of the same weights.
_OTHER_NAMES = {ours: (theirs,) for theirs, ours in ENGINE_NAMES.items()} | {
    "post_attention_layernorm.weight": (
        "post_self_attn_layernorm.weight",
        "self_attention.linear_proj.post_layernorm.weight",
    ),
    "post_mlp_layernorm.weight": ("mlp.linear_fc2.post_layernorm.weight",),
}
_PREFIXES = ("", "model.", "module.", "model.module.")
_TRAINING_STATE = ("optimizer", "chained_", "rng", "rerun", "opt_param", "lr_scheduler")  # beginnings of names
_NO_WEIGHTS = ("_extra_state", "inv_freq", "_extra_state/shard")
_ZERO_CENTERED = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")  # settings of norms that scale by 1 + weight
_SHOWN = 10
_TEMPLATE = "name the original model, whose config.json is then used: --tokenizer FOLDER or hf:ORGANISATION/NAME"


def import_checkpoint(path: Path, out: Path, *, tokenizer: Path | None, max_shard_bytes: int) -> str:
    """Write a checkpoint of NeMo-Aligner, Megatron-LM or Megatron-Bridge as a Hugging Face folder; return a summary.

    ``tokenizer`` is a folder with a tokenizer; if it has a config.json, that is the configuration of the model. One weight
    at a time is in memory. The folder appears under its name when it is complete.

    Raises UserError if the checkpoint cannot be read, has weights that its model family lacks, or lacks some, and if the
    configuration or the tokenizer is missing or does not fit.
    """
    check_target(out, is_ours=is_our_model)
    folder = NewFolder(target=out)
    try:
        folder.start()
        with open_checkpoint(path, within=folder.path) as checkpoint:  # removed with it after a kill
            names = _strip_prefix(checkpoint)
            _write_tokenizer(checkpoint, tokenizer, folder.path)
            config = _configuration(checkpoint, names, tokenizer)
            dtype = str(checkpoint.tensors.read(names["decoder.final_layernorm.weight"]).dtype).removeprefix("torch.")
            if _has_own_output(checkpoint, names, rows=config.get("vocab_size")):
                config["tie_word_embeddings"] = False
            text = json.dumps(with_dtype(config, dtype), indent=2) + "\n"
            (folder.path / CONFIG).write_text(text, encoding="utf-8")
            architecture = read_architecture(folder.path, tensor_parallel=1)
            check_tokenizer(folder.path, vocab_size=architecture.vocab_size)
            weights = _weights(checkpoint, names, architecture)
            write_shards(weights, folder.path, max_shard_bytes=max_shard_bytes)
        folder.publish()
    except OSError as error:
        text = f"OUT must be a folder that can be written, got {out}: {error.strerror or error}"
        raise UserError(f"{text}; free some space, or choose another folder") from error
    finally:
        folder.discard()
    count = len(read_json(out / INDEX)["weight_map"])
    return f"{count} weights of {path} ({architecture.family.name}, {dtype}) are in {out}"


def _strip_prefix(checkpoint: MegatronCheckpoint) -> dict[str, str]:
    """Return the stored name of each weight by its name in megatron-core's model; the state of a training is left out."""
    stored = checkpoint.tensors.shapes
    embedding = "embedding.word_embeddings.weight"
    prefix = next((prefix for prefix in _PREFIXES if prefix + embedding in stored), None)
    if prefix is None:
        raise UserError(
            f"FILE must be a GPT model of megatron-core, got {checkpoint.path} without {embedding}; choose another"
        )
    names = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    return {
        name: full for name, full in names.items() if not name.startswith(_TRAINING_STATE) and not name.endswith(_NO_WEIGHTS)
    }


def _write_tokenizer(checkpoint: MegatronCheckpoint, given: Path | None, folder: Path) -> None:
    source = checkpoint.tokenizer if given is None else given
    if isinstance(source, str) and Path(source).expanduser().is_dir():
        source = Path(source).expanduser()
    if isinstance(source, Path) and source.is_dir():
        check_tokenizer(source)
        copy_companions(source, folder)
    elif isinstance(source, Path) and source.is_file():  # a SentencePiece model, as of Llama 2 and Mistral
        _convert_sentencepiece(source, folder, checkpoint.path)
    else:
        named = f", which names {source}" if source is not None else ""
        example = f"hf:{source}" if isinstance(source, str) and source.count("/") == 1 else "hf:ORGANISATION/NAME"
        text = f"must be given for a checkpoint without a tokenizer, got none with {checkpoint.path}{named}"
        raise UserError(f"--tokenizer {text}; e.g. --tokenizer FOLDER or --tokenizer {example}")


def _convert_sentencepiece(file: Path, folder: Path, archive: Path) -> None:
    """Write the SentencePiece model of an archive as a tokenizer that needs only the library tokenizers."""
    from transformers import LlamaTokenizer

    shutil.copyfile(file, folder / "tokenizer.model")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}  # nosec B105  # no passwords
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    try:
        check_tokenizer(folder)
        LlamaTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(folder)
    except Exception as error:  # of the libraries that read it, or because they are missing
        text = f"FILE must have a tokenizer that transformers reads, got {archive} with {file.name}"
        packages = "install sentencepiece and protobuf (pip install sentencepiece protobuf)"
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{text} ({type(error).__name__}: {reason}); {packages}, or give --tokenizer FOLDER") from error


def _configuration(checkpoint: MegatronCheckpoint, names: Mapping[str, str], tokenizer: Path | None) -> dict[str, Any]:
    """Return the content of config.json: that of the tokenizer's folder, or derived from settings and names of weights."""
    if tokenizer is not None and (tokenizer / CONFIG).is_file():
        config = read_json(file_inside(tokenizer, CONFIG))
        if differing := compare(config, checkpoint.settings):
            text = f"--tokenizer must be a folder with the config.json of this model, or with none, got {tokenizer / CONFIG}"
            raise UserError("\n  ".join([f"{text} with other values than {checkpoint.path}:", *differing]))
        return config
    rows = checkpoint.tensors.shapes[names["embedding.word_embeddings.weight"]][0]
    ours = {name.removeprefix("decoder.layers.").lstrip("0123456789").removeprefix(".") for name in names}
    try:
        return derive(checkpoint.settings, ours, rows=rows)
    except ValueError as error:
        raise UserError(
            f"FILE must have the settings of a model of a known family, got {checkpoint.path}: {error}; {_TEMPLATE}"
        ) from error


def _has_own_output(checkpoint: MegatronCheckpoint, names: Mapping[str, str], *, rows: int | None) -> bool:
    """Return whether there is an output weight with other values than the embedding; rows beyond ``rows`` are padding."""
    if "output_layer.weight" not in names:
        return False
    output, embedding = (names[name] for name in ("output_layer.weight", "embedding.word_embeddings.weight"))
    return not torch.equal(checkpoint.tensors.read(output)[:rows], checkpoint.tensors.read(embedding)[:rows])


class _Parameter(NamedTuple):
    """A parameter of megatron-core, and the stored tensors that make it up, each with the index of its part."""

    mapping: ParamMapping
    place: dict[str, int]
    parts: list[tuple[str, tuple[int, ...]]]


def _weights(
    checkpoint: MegatronCheckpoint, names: Mapping[str, str], architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name in the Hugging Face folder; all names and shapes are checked before the first.

    Raises UserError if weights are missing, unexpected or of another shape, or a value is not finite.
    """
    settings, files = checkpoint.settings, FileWeights(architecture=architecture)
    zero_centered = settings.get("normalization") == "layernorm1p" or any(map(settings.get, _ZERO_CENTERED))
    norm_offset = int(zero_centered and not architecture.zero_centered_norm)
    for mapping, place, parts in _find_parameters(checkpoint, names, architecture):
        values = [checkpoint.tensors.read(names[name], index) for name, index in parts]
        whole = torch.cat(values) if len(values) > 1 else values[0]
        if mapping.split is Split.VOCABULARY:  # rows beyond the vocabulary are padding
            whole = whole[: architecture.vocab_size].clone()
        if norm_offset and "layernorm" in mapping.mcore_name:
            whole = whole + norm_offset
        if not math.isfinite(float(whole.sum())) and not torch.isfinite(whole).all():
            text = f"FILE must have finite weights, got {checkpoint.path} with NaN or infinity in {parts[0][0]}"
            raise UserError(f"{text}; import an earlier checkpoint")
        yield from files.of(mapping, place, whole)


def _find_parameters(
    checkpoint: MegatronCheckpoint, names: Mapping[str, str], architecture: Architecture
) -> list[_Parameter]:
    """Return all parameters of the model; raise UserError if weights are missing, unexpected or of another shape."""
    parameters, problems = list[_Parameter](), list[str]()
    for mapping in architecture.family.mappings:
        shapes, dimension = source_shapes(mapping, architecture), split_dimension(mapping)
        expected = [sum(each[axis] for each in shapes) if axis == dimension else size for axis, size in enumerate(shapes[0])]
        for place in architecture.instances(mapping, range(architecture.num_layers)):
            parts = _locate(mapping.mcore_name, place, names)
            if not parts:
                problems.append(f"missing: {mapping.mcore_name.format(**place)}")
                continue
            found = [checkpoint.tensors.shapes[names[name]][len(index) :] for name, index in parts]
            shape = [sum(part[0] for part in found), *found[0][1:]] if len(found) > 1 else [*found[0]]
            rows_fit = mapping.split is Split.VOCABULARY and shape[1:] == expected[1:] and shape[0] >= expected[0]
            if shape != expected and not rows_fit:
                problems.append(f"{parts[0][0]}: expected shape {expected}, got {shape}")
            parameters.append(_Parameter(mapping, place, parts))
    used = {name for parameter in parameters for name, _ in parameter.parts}
    if architecture.tied:
        used.add("output_layer.weight")  # a copy of the embedding
    problems += [f"unexpected: {name}" for name in names if name not in used]
    if problems:
        shown = [*problems[:_SHOWN], *([f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])]
        text = f"FILE must have the weights of {architecture.family.hf_architecture} as its settings describe them"
        raise UserError("\n  ".join([f"{text}, got {checkpoint.path} with {len(problems)} differences:", *shown, _TEMPLATE]))
    return parameters


def _locate(mcore_name: str, place: Mapping[str, int], names: Mapping[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the stored tensors that make up a parameter, each with the index of its part; empty if there are none."""
    for name, index in _candidates(mcore_name, place):
        if name in names:
            return [(name, index)]
        if f"{name}_w" in names and f"{name}_v" in names:  # gate and up projection as separate tensors
            return [(f"{name}_w", index), (f"{name}_v", index)]
    return []


def _candidates(mcore_name: str, place: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names that a parameter may have, each with its index: layers, and experts, may be stacked in one tensor."""
    if not mcore_name.startswith(_LAYER):
        yield mcore_name, ()
        return
    ours = mcore_name.removeprefix(_LAYER)
    forms: list[tuple[str, tuple[int, ...]]] = [(name, ()) for name in (ours, *_OTHER_NAMES.get(ours, ()))]
    if ours.startswith(_EXPERT):
        rest, expert = ours.removeprefix(_EXPERT), place["expert"]
        forms = [
            (f"mlp.experts.experts.{rest}", (expert,)),
            (f"mlp.experts.experts.{expert}.{rest}", ()),
            (f"mlp.experts.local_experts.{expert}.{rest}", ()),
            (f"mlp.experts.{rest}{expert}", ()),
        ]
    for form, index in forms:
        yield f"decoder.layers.{place['layer']}.{form}", index
        yield f"decoder.layers.{form}", (place["layer"], *index)
