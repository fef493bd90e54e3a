"""SHA-256 of large files, read once and kept until a file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from nemo_kto.utils.files import file_hash, kept_hash, make_folder, publish_file
from nemo_kto.utils.locks import one_writer

logger = logging.getLogger(__name__)

MIN_KEPT_BYTES = 2**20  # a smaller file is hashed in less time than its hash is found
_MIN_LOGGED_BYTES = 2**30  # a smaller one takes less than a second or two


def hash_once(file: Path, *, cache_dir: Path, private: bool) -> str:
    """SHA-256 of a file. That of a large one is kept in ``cache_dir`` while its size, its times and its inode stay.

    Nobody can set back the time of the last change to a file or its name, so that a changed file is read again.

    Args:
        file: of any size; one of less than ``MIN_KEPT_BYTES`` is read each time.
        cache_dir: folder whose folder "hashes" is made if absent.
        private: only the user may read what is kept; else the umask decides.

    Raises:
        OSError: the file cannot be read.
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
        if (known := kept_hash(kept)) is None:  # else it was written while this process waited
            known = file_hash(file)
            with publish_file(kept, private=private, durable=False) as writing:
                writing.write_text(known, encoding="ascii")
    return known


def _kept_in(cache_dir: Path, file: Path, state: os.stat_result) -> Path:
    about = [str(file.resolve()), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    return cache_dir / "hashes" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.sha256"
