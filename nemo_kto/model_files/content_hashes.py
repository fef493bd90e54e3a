"""Hashes of the content of model folders, and the files on which they depend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.model_files.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from nemo_kto.model_files.checkpoint_files import INFO, config_folder, is_checkpoint
from nemo_kto.model_files.safetensors_files import INDEX, SINGLE
from nemo_kto.utils.files import file_inside
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
