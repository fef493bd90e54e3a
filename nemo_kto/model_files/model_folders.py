"""Model folders: a whole model, or adapters with the location of their base model; hashes of their content.

No heavy packages are imported, so that a command line can be checked with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_kto.architecture.config_fields import ModelFields
from nemo_kto.architecture.config_file import CONFIG, other_format_of, read_config_file
from nemo_kto.architecture.families import FAMILIES, MULTIMODAL
from nemo_kto.errors import UserError
from nemo_kto.model_files.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapter
from nemo_kto.model_files.checkpoint_files import INFO, config_folder, is_checkpoint
from nemo_kto.model_files.hub import HUB
from nemo_kto.model_files.safetensors_files import INDEX, SINGLE, find_weights
from nemo_kto.utils.fields import file_errors
from nemo_kto.utils.files import file_inside, irregular, read_json
from nemo_kto.utils.hashes import hash_once

_PARTS, _PART_BYTES = 128, 2**13  # of a file for quick_hash
_THREADS = 8  # hashlib releases the GIL
_TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges", "spiece")


def model_files(folder: Path) -> list[Path]:
    """Return the files that determine what a model or an adapter computes: its weights and its configuration.

    ``folder`` is a Hugging Face folder, a folder in PEFT's format, or one of our own checkpoints, whose weights are in
    state/. A checkpoint of adapters, or a folder in PEFT's format, also needs its base model, which is stored elsewhere.
    """
    if is_checkpoint(folder):
        weights = [file for file in (folder / "state").rglob("*") if file.is_file()]
        return sorted([*weights, folder / INFO, config_folder(folder) / CONFIG])
    names = {CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS, SINGLE}
    if (folder / INDEX).is_file():
        names = {CONFIG, INDEX, *json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    return sorted(file for file in (folder / name for name in names) if file.is_file())


def quick_hash(folder: Path) -> str:
    """Return a hash of the sizes of the files of weights in a folder, and of evenly spaced parts, which training changes.

    At most _PARTS * _PART_BYTES of each file are read. Raises UserError if one is a link out of the folder.
    """
    found = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") and file.is_file()):
        size = file.stat().st_size
        found.update(f"{file.name} {size} ".encode())
        with file_inside(folder, file.name).open("rb") as content:
            for number in range(_PARTS):
                content.seek(size * number // _PARTS)
                found.update(content.read(_PART_BYTES))
    return found.hexdigest()[:16]


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder that determine how a row is tokenised, including the chat template."""
    files = [file for file in folder.iterdir() if file.name.startswith(_TOKENIZER_FILES)]
    return sorted(file for file in [*files, *folder.glob("additional_chat_templates/*")] if file.is_file())


def content_hash(folder: Path, files: Sequence[Path], *, cache_dir: Path, shared: bool = False) -> str:
    """Return a hash of the content of files and of their names relative to ``folder``.

    Hashes of large files are cached in ``cache_dir``, which is created if absent; with ``shared`` others may read them, as
    the umask allows, else only the user may.
    """
    files = sorted(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(partial(hash_once, cache_dir=cache_dir, private=not shared), files))
    named = [(str(file.relative_to(folder)), of_file) for file, of_file in zip(files, hashes, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "index_topk",
)  # fmt: skip

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Files in the checkpoints of NeMo-Aligner, Megatron-LM and Megatron-Bridge.
_OTHER_PROGRAMS = (".metadata", "model_config.yaml", "run_config.yaml", "latest_checkpointed_iteration.txt")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Source of a model's weights."""

    base: Path  # a Hugging Face folder, or one of our checkpoints of a whole model
    # a folder in PEFT format, or one of our checkpoints of adapters; None for only the base model
    adapters: Path | None = None

    def resolve(self) -> ModelSource:
        """Return the source with absolute paths, for comparisons."""
        return ModelSource(base=self.base.resolve(), adapters=self.adapters and self.adapters.resolve())

    def __str__(self) -> str:
        return f"{self.base}" if self.adapters is None else f"the adapters {self.adapters} on {self.base}"


def find_source(folder: Path, *, default_base: Path | None = None) -> ModelSource:
    """Return the source of the model in ``folder``: a Hugging Face folder, one of our checkpoints, or a PEFT folder.

    ``default_base`` is the base model for adapters in PEFT format that name none, or that name a hub model, which has no
    local folder. Raises UserError if the folder is none of these, or the base model of its adapters does not exist.
    """
    if is_checkpoint(folder):
        adapters = read_json(folder / INFO).get("adapters")
        if not isinstance(adapters, dict):
            return ModelSource(base=folder)
        return ModelSource(base=_base_there(folder, str(adapters["base_model"])), adapters=folder)
    if os.path.isfile(folder / ADAPTER_CONFIG):
        if not is_peft_folder(folder):
            raise UserError(
                f"must be a model or adapters, got {folder}, which has {ADAPTER_CONFIG} and weights of a whole model; "
                "move one of them to another folder"
            )
        name = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        is_path = bool(name) and Path(str(name)).expanduser().is_absolute()  # else a hub name: organisation/model
        base = named_base(folder) or (None if is_path else default_base) or _base_there(folder, str(name))
        return ModelSource(base=base, adapters=folder)
    if os.path.isfile(folder / CONFIG):
        return ModelSource(base=folder)
    raise UserError(
        f"must be a Hugging Face folder (with {CONFIG}), a checkpoint of nemo-kto (with {INFO}) or adapters in PEFT "
        f"format (with {ADAPTER_CONFIG}), got {folder}{irregular_files(folder)}; "
        f"{remedy_for_missing(folder, 'download it or correct the path')}"
    )


def remedy_for_missing(folder: Path, usual: str) -> str:
    """Return how to get a model from what is not a model folder; ``usual`` for a folder that is only missing."""
    if folder.suffix == ".nemo" or any(os.path.exists(folder / name) for name in _OTHER_PROGRAMS):
        return f"write it as a Hugging Face folder first: nemo-kto import {folder} OUT"
    if (other := other_format_of(folder)) is not None:
        return other
    name = str(folder)
    if not _REPOSITORY.fullmatch(name) or os.path.lexists(folder.parent):
        return usual
    return (
        f"correct the path, or for the model of that name on the Hugging Face hub write {HUB}{name}, or download it with "
        f"`hf download {name} --local-dir {folder.name}` and name the folder {folder.name}"
    )


def irregular_files(folder: Path) -> str:
    """Return text such as ", where config.json is a folder" about irregular model files; usually empty."""
    kinds = {name: irregular(folder / name) for name in (CONFIG, INFO, ADAPTER_CONFIG)}
    return "".join(f", where {name} is {kind}" for name, kind in kinds.items() if kind is not None)


def is_whole_model(folder: Path) -> bool:
    """Return True for a Hugging Face folder, and for one of our checkpoints that is not a checkpoint of adapters."""
    if is_checkpoint(folder):
        return read_json(folder / INFO).get("adapters") is None
    return os.path.isfile(folder / CONFIG)


def is_peft_folder(folder: Path) -> bool:
    """Return True for adapters in PEFT format without the weights of a whole model beside them."""
    has_adapters = os.path.isfile(folder / ADAPTER_CONFIG) and not is_checkpoint(folder)
    return has_adapters and not any(folder.glob("model*.safetensors"))


def named_base(adapters: Path) -> Path | None:
    """Return the base model named by adapters in PEFT format, if it is a local folder and not only a hub name."""
    name = read_json(adapters / ADAPTER_CONFIG).get("base_model_name_or_path")
    base = Path(str(name)).expanduser()
    return base if name and is_whole_model(base) else None


def check_files(folder: Path, adapters: Path | None) -> int:
    """Check the files of a whole model, and of adapters in PEFT format, for libraries that load them; return their size.

    The configuration of a family that can be trained is checked as for training. Raises UserError for damaged files, files
    outside of their folder, and weights in other formats than safetensors.
    """
    if os.path.isfile(folder / ADAPTER_CONFIG):  # transformers would load these adapters too, and perhaps another model
        find_source(folder)
        raise UserError(f"{folder} must be a whole model, got adapters ({ADAPTER_CONFIG}); name another folder")
    config = read_json(file_inside(folder, CONFIG))
    names = config.get("architectures")
    if wrong := file_errors(ModelFields, {"architectures": names}):
        raise UserError(f"{folder / CONFIG}: {'; '.join(wrong.values())}; correct it, or choose another model")
    if names and names[0] in (*FAMILIES, *(family.hf_architecture for family in MULTIMODAL)):
        read_config_file(folder)
    files = {tensor.file for tensor in find_weights(folder, quantized=True).values()}
    if adapters is not None:
        check_adapter(adapters)
        files.add(adapters / ADAPTER_WEIGHTS)
    return sum(file.stat().st_size for file in files)


def check_same_shape(policy: Path, other: Path) -> None:
    """Raise a UserError if config.json shows a shape other than the policy's; a full check needs both models."""
    files = [config_folder(folder) / CONFIG for folder in (policy, other)]
    expected, found = (read_json(file) if os.path.isfile(file) else {} for file in files)
    pairs = {key: (found[key], expected[key]) for key in _SHAPE if key in expected and key in found}
    refuse_other_shape(policy, other, {key: pair for key, pair in pairs.items() if pair[0] != pair[1]})


def refuse_other_shape(policy: Path, other: Path, differing: Mapping[str, tuple[object, object]]) -> None:
    """Raise a UserError if a model differs from the policy: name -> (value of the other model, value of the policy)."""
    if differing:
        values = ", ".join(f"{name} {found} instead of {expected}" for name, (found, expected) in differing.items())
        raise UserError(
            f"must be a model of the same shape as the policy in {policy}, got {other} with {values}; name another model, "
            "or train one of its shape"
        )


def _base_there(folder: Path, base: str) -> Path:
    if not is_whole_model(Path(base).expanduser()):
        where = ADAPTER_CONFIG if os.path.isfile(folder / ADAPTER_CONFIG) else INFO
        raise UserError(
            f"must be adapters whose base model is on this machine, got {folder}, whose {where} names {base}, which is not "
            f"a model folder; copy it there, or correct {where}"
        )
    return Path(base).expanduser()
