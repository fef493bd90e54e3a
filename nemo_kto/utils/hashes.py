"""Cached SHA-256 of large files, recomputed only after a file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from nemo_kto.utils.files import file_hash, kept_hash, make_folder, publish_file
from nemo_kto.utils.locks import one_writer

logger = logging.getLogger(__name__)

MIN_KEPT_BYTES = 2**20  # hashing a smaller file takes less time than looking up its hash
_MIN_LOGGED_BYTES = 2**30  # hashing a smaller file takes at most a second or two


def hash_once(file: Path, *, cache_dir: Path, private: bool) -> str:
    """Return the SHA-256 of a file; for a large file, cache it until size, timestamps or inode of the file change.

    ctime, the time of the last change to a file or its name, cannot be set back, so that a changed file is always read
    again.

    Args:
        file: file of any size; one smaller than ``MIN_KEPT_BYTES`` is read each time.
        cache_dir: folder of the cache; its subfolder "hashes" is created if absent.
        private: whether only the user may read the cached hashes; otherwise the umask applies.

    Raises:
        OSError: If the file cannot be read.
    """
    state = file.stat()
    if state.st_size < MIN_KEPT_BYTES:
        return file_hash(file)
    kept = _kept_in(cache_dir, file, state)
    if (known := kept_hash(kept)) is not None:
        return known
    if state.st_size >= _MIN_LOGGED_BYTES:
        logger.info("hashing %s (%.0f GB), once", file, state.st_size / 1e9)
    make_folder(kept.parent, private=private)
    with one_writer(kept, private=private):
        if (known := kept_hash(kept)) is None:  # otherwise another process wrote it while this one waited
            known = file_hash(file)
            with publish_file(kept, private=private, durable=False) as writing:
                writing.write_text(known, encoding="ascii")
    return known


def _kept_in(cache_dir: Path, file: Path, state: os.stat_result) -> Path:
    about = [str(file.resolve()), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    return cache_dir / "hashes" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.sha256"
