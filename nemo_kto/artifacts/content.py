"""What a model is, by the content of its files: the same wherever its folder lies, another if a single value differs.

Every byte of the weights is read, since a part of them would not show what changed elsewhere. That costs as much as loading
them, once: files are hashed next to each other, and the hash of a large one is kept until its size or its times change, of
which nobody can set back that of the last change to the file or its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.artifacts.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from nemo_kto.artifacts.checkpoint_files import INFO, config_folder, is_checkpoint
from nemo_kto.artifacts.safetensors_files import INDEX, SINGLE
from nemo_kto.utils.hashes import hash_once

_THREADS = 8  # hashlib lets other threads run while it works
_TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges", "spiece")


def model_files(folder: Path) -> list[Path]:
    """The files that decide what a model or an adapter computes: its weights and its configuration.

    ``folder``: a Hugging Face folder, a folder in PEFT's format, or one of our own checkpoints, which has its weights in
    state/. A checkpoint of adapters, and a folder in PEFT's format, also need their base model, which lies elsewhere.
    """
    if is_checkpoint(folder):
        weights = [file for file in (folder / "state").rglob("*") if file.is_file()]
        return sorted([*weights, folder / INFO, config_folder(folder) / CONFIG])
    names = {CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS, SINGLE}
    if (folder / INDEX).is_file():
        names = {CONFIG, INDEX, *json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    return sorted(file for file in (folder / name for name in names) if file.is_file())


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that decide how a row becomes tokens, with the chat template."""
    files = [file for file in folder.iterdir() if file.name.startswith(_TOKENIZER_FILES)]
    return sorted(file for file in [*files, *folder.glob("additional_chat_templates/*")] if file.is_file())


def content_hash(folder: Path, files: Sequence[Path], *, cache_dir: Path, shared: bool = False) -> str:
    """Hash of the names and the content of files in ``folder``.

    Args:
        folder: the names count from here on.
        files: in any order; all below ``folder``.
        cache_dir: where the hashes of large files are kept; made if absent.
        shared: others may read these, as the umask says; else only the user.
    """
    files = sorted(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(partial(hash_once, cache_dir=cache_dir, private=not shared), files))
    named = [(str(file.relative_to(folder)), of_file) for file, of_file in zip(files, hashes, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()
