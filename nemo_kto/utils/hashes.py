"""SHA-256 of files; that of a large file is cached, and recomputed only after the file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

from nemo_kto.utils.files import make_folder, open_file, publish_file, read_bytes
from nemo_kto.utils.locks import one_writer

logger = logging.getLogger(__name__)

MIN_KEPT_BYTES = 2**20  # hashing a smaller file takes less time than looking up its hash
_MIN_LOGGED_BYTES = 2**30  # hashing a smaller file takes at most a second or two
_HASH = re.compile(rb"[0-9a-f]{64}")


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open_file(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def stored_hash(file: Path, compute: Callable[[], str], *, private: bool) -> str:
    """Return the SHA-256 stored in a file, which is written if it does not exist or is damaged."""
    if (known := _read_hash(file)) is None:
        known = compute()
        make_folder(file.parent, private=private)
        with publish_file(file, private=private, durable=False) as writing:
            writing.write_text(known, encoding="ascii")
    return known


def _read_hash(file: Path) -> str | None:
    """Return the hash stored in a file; None if the file does not exist, or is damaged, as after a crash of the machine."""
    try:
        text = read_bytes(file)
    except FileNotFoundError:
        return None
    if _HASH.fullmatch(text):
        return text.decode()
    logger.warning("%s is damaged, and is written again", file)
    file.unlink(missing_ok=True)
    return None


def hash_once(file: Path, *, cache_dir: Path, private: bool) -> str:
    """Return the SHA-256 of a file; if it has at least MIN_KEPT_BYTES, its hash is cached in ``cache_dir``/hashes.

    It is computed again if size, timestamps or inode of the file change; ctime cannot be set back, so that no change is
    missed. With ``private``, only the user may read the cached hashes.
    """
    state = file.stat()
    if state.st_size < MIN_KEPT_BYTES:
        return file_hash(file)
    about = [str(file.resolve()), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    stored = cache_dir / "hashes" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.sha256"
    if (known := _read_hash(stored)) is not None:
        return known
    if state.st_size >= _MIN_LOGGED_BYTES:
        logger.info("hashing %s (%.0f GB), once", file, state.st_size / 1e9)
    make_folder(stored.parent, private=private)
    with one_writer(stored, private=private):  # another process may write it while this one waits
        return stored_hash(stored, lambda: file_hash(file), private=private)
