"""Content hashes of model folders, and the files that accompany weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from nemo_kto.architecture.config_fields import QUANTIZATION_FIELDS, quantization_settings
from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.architecture.families import ALIASES
from nemo_kto.artifacts.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from nemo_kto.artifacts.checkpoint_files import INFO, config_folder, is_checkpoint
from nemo_kto.artifacts.safetensors_files import INDEX, SINGLE
from nemo_kto.errors import UserError
from nemo_kto.utils.files import file_inside, read_bytes, read_json
from nemo_kto.utils.hashes import hash_once

_CLASS = "tokenizer_config.json"  # may name the class of a tokenizer
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


logger = logging.getLogger(__name__)

CARD = "README.md"  # the model card
_LICENSES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_MAX_BYTES = 2**28  # the largest tokenizers have a tenth of this size
# A warning names these if they cannot be copied; other files of a tokenizer are copied if they are files.
_EXPECTED = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def read_companions(folder: Path, *, into: str) -> dict[str, bytes]:
    """Read the small files of a model: path below ``folder`` -> content.

    They are the configuration, the tokenizer's files, the chat templates, the license and the model card.

    A file that cannot be copied (not regular, not readable, larger than 256 MiB, or a broken link) is left out, with a
    warning that names it and the destination, ``into``: transformers, which has read the tokenizer, did not need it.
    Raises UserError if a file other than the license and the model card is a link that leads out of the folder; these two
    are left out as well.
    """
    contents = {}
    # all that transformers may read beside the weights
    about = {CARD, *(file.name for pattern in _LICENSES for file in folder.glob(pattern))}
    names = {*_EXPECTED, *about, *(file.relative_to(folder).as_posix() for file in tokenizer_files(folder))}
    for name in sorted(name for name in names if os.path.lexists(folder / name) and not os.path.isdir(folder / name)):
        try:
            path = file_inside(folder, name)
        except UserError as error:
            if name not in about:
                raise
            logger.warning("%s is not copied into %s: %s", folder / name, into, error)
            continue
        try:
            contents[name] = read_bytes(path, limit=_MAX_BYTES)
        except OSError as error:
            logger.warning("%s is not copied into %s: %s", path, into, error.strerror)
    return contents


def model_config(source: Path, *, tied: bool) -> dict[str, Any]:
    """Return the content of config.json, without names of code, which is not copied.

    ``tied``: the output layer has the weight of the embedding, as the weights show.
    """
    config = read_json(file_inside(source, CONFIG))
    config.pop("auto_map", None)
    if not tied and isinstance(text := config.get("text_config"), dict) and text.get("tie_word_embeddings"):
        config["text_config"] = {**text, "tie_word_embeddings": False}  # which transformers obeys in some models
    return config if tied else {**config, "tie_word_embeddings": False}


def transformers_fields(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the fields of config.json, if it exists, and whether an alias had to be replaced in its ``model_type``."""
    fields = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    known = ALIASES.get(str(fields.get("model_type")))
    return fields | ({} if known is None else {"model_type": known}), known is not None


def without_class(folder: Path) -> dict[str, Any] | None:
    """Return tokenizer_config.json without code or a class of mistral-common, None if no tokenizer.json replaces them."""
    config = read_json(folder / _CLASS) if all((folder / name).is_file() for name in (_CLASS, "tokenizer.json")) else {}
    if not config.get("auto_map") and not str(config.get("tokenizer_class")).startswith("MistralCommon"):
        return None
    return {name: config[name] for name in config if name != "auto_map"} | {"tokenizer_class": "PreTrainedTokenizerFast"}


def is_quantized(folder: Path) -> bool:
    """Return whether the config.json of a folder says that its weights are quantized; False if it cannot be read."""
    with contextlib.suppress(UserError):
        return quantization_settings(read_json(folder / CONFIG)) is not None
    return False


def auto_class(folder: Path) -> str:
    """Return the class of transformers that loads the model in a folder, or the base model of the adapters in it."""
    with contextlib.suppress(UserError):
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
            folder = Path(str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")))
        if "vision_config" in read_json(folder / CONFIG):
            return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration for unquantized weights of this dtype, which keeps its name for the dtype."""
    kept = {name: value for name, value in config.items() if name not in QUANTIZATION_FIELDS}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = {name: value for name, value in text.items() if name not in QUANTIZATION_FIELDS}
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    return kept | dict.fromkeys(names or ["torch_dtype"], dtype)  # all versions of transformers read the older name


def copy_companions(source: Path, target: Path) -> None:
    """Copy all companions but the configuration and the model card into an export, with default permissions.

    Both are written for the exported model, and tokenizer_config.json without code, which is not copied. Like
    :func:`read_companions` otherwise.

    Raises OSError if ``target`` cannot be written.
    """
    companions, plain = read_companions(source, into="the export"), without_class(source)
    if plain is not None:
        companions[_CLASS] = (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()
    for name, content in companions.items():
        if name not in (CONFIG, CARD):
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)
