"""What a model is, by the content of its files: the same wherever its folder lies, another if a single value differs.

Every byte of the weights is read, since a part of them would not show what changed elsewhere. That costs as much as loading
them, once: files are hashed next to each other, and the hash of a large one is kept until its size or its times change, of
which nobody can set back that of the last change to the file or its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from nemo_kto.checkpoint.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from nemo_kto.checkpoint.checkpoint_files import INFO, config_folder, is_checkpoint
from nemo_kto.checkpoint.safetensors_files import INDEX, SINGLE
from nemo_kto.files import file_hash, kept_hash, make_folder, publish_file
from nemo_kto.locks import one_writer
from nemo_kto.models.config_file import CONFIG

logger = logging.getLogger(__name__)

_THREADS = 8  # hashlib lets other threads run while it works
_MIN_KEPT_BYTES = 2**20  # a smaller file is hashed in less time than its hash is found
_MIN_TOLD_BYTES = 2**30  # a smaller one takes less than a second or two
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
        hashes = list(pool.map(partial(_file_hash, cache_dir=cache_dir / "hashes", private=not shared), files))
    named = [(str(file.relative_to(folder)), of_file) for file, of_file in zip(files, hashes, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _file_hash(file: Path, *, cache_dir: Path, private: bool) -> str:
    state = file.stat()
    if state.st_size < _MIN_KEPT_BYTES:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    about = [str(file.resolve()), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    kept = cache_dir / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.sha256"
    if (known := kept_hash(kept)) is not None:
        return known
    if state.st_size >= _MIN_TOLD_BYTES:
        logger.info("hashing %s (%.0f GB), once", file, state.st_size / 1e9)
    make_folder(cache_dir, private=private)
    with one_writer(kept, private=private):
        if (known := kept_hash(kept)) is not None:  # while this process waited
            return known
        found = file_hash(file)
        with publish_file(kept, private=private) as writing:
            writing.write_text(found, encoding="ascii")
    return found
