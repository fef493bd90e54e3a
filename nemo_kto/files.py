"""Files of others that are read with one clear error; files and folders of ours that appear complete or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError

logger = logging.getLogger(__name__)

_OUTSIDE = "copy it there, or download the model again"
_CHUNK_BYTES = 2**24
_UNPUBLISHED = re.compile(r"\.(.+)-[0-9a-f]{32}")
_HASH = re.compile(rb"[0-9a-f]{64}")
WRITING, REMOVING = ".writing-", ".removing-"  # begin the names of folders that are not complete


def read_json(file: Path, *, remedy: str = "download or write it again") -> dict[str, Any]:
    """The JSON object in a file that may hold anything.

    Raises:
        UserError: the file cannot be read, or is no JSON object; names it, and ends with the remedy.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    except (ValueError, RecursionError) as error:  # bytes that are no text, text that is no JSON, brackets without end
        raise UserError(f"{file} must be JSON, got something else ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must be a JSON object, got {type(content).__name__}; {remedy}")
    return content


def refuse_code(file: Path, content: Mapping[str, object]) -> None:
    """Refuse a configuration of a model or tokenizer whose classes are Python files that came with it.

    Raises:
        UserError: its auto_map is set.
    """
    if content.get("auto_map"):
        got = repr(content["auto_map"])
        told = f"{file}: auto_map must not be set, got {got if len(got) <= 60 else got[:57] + '...'}"
        raise UserError(
            f"{told}: code that comes with a model is not run; choose another model, or remove auto_map if transformers has "
            "the same classes itself"
        )


def file_hash(file: Path) -> str:
    """SHA-256 of a file's content, read piece by piece.

    Raises:
        OSError: it cannot be read.
    """
    found = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def kept_hash(file: Path) -> str | None:
    """The SHA-256 that is kept in a file; None where there is none, or a crash has damaged it, which removes the file."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    if _HASH.fullmatch(text):
        return text.decode()
    logger.warning("%s is damaged, and is written again", file)
    file.unlink(missing_ok=True)
    return None


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file that a model folder holds or names, links followed only as far as the model's own files.

    A link may lead to another file of the folder. In Hugging Face's cache it may lead to the blobs of the same model
    (models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH). The folder itself may be a link.

    Raises:
        UserError: the file is outside.
    """
    if "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise UserError(f"{folder} must hold all its files, got {name!r}, which is outside; {_OUTSIDE}")
    path, root = folder / name, Path(os.path.realpath(folder))
    roots = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        roots.append(root.parent.parent / "blobs")
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(each) for each in roots):
        raise UserError(f"{path} must be a file of its folder, got a link to {target}, which is outside; {_OUTSIDE}")
    return path


def make_folder(folder: Path, *, private: bool) -> None:
    """Make a folder and those above it where absent; ``private``: those made are for the user only."""
    absent = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(absent):
        each.mkdir(mode=0o700 if private else 0o777, exist_ok=True)


@contextlib.contextmanager
def publish_file(target: Path, *, private: bool = False, durable: bool = True) -> Iterator[Path]:
    """Give a path to write to. At the end of the block the file there gets the name ``target``.

    Nothing appears if the block raises, or removes what it wrote. Any number of processes may publish one file at once. The
    content is on disk before the name is, so that a crash of the machine leaves the whole file or the one before.
    ``private``: only the user may read it, also while it is written; else the umask decides. ``durable``: False for a file
    whose content is checked whenever it is read: it may be damaged after a crash of the machine, and costs no waiting.
    """
    writing = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        if private:
            writing.touch(mode=0o600, exist_ok=False)
        yield writing
        if writing.exists():
            if durable:
                flush(writing)
            writing.replace(target)
            if durable:
                flush(target.parent)
    finally:
        writing.unlink(missing_ok=True)


def remove_unpublished(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove what killed processes have left of files of these names, or of all, which nobody may be writing now."""
    for path in folder.iterdir():
        left = _UNPUBLISHED.fullmatch(path.name)
        if left and (names is None or left[1] in names) and path.is_file():
            path.unlink(missing_ok=True)


def partial_folder(target: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return target.with_name(WRITING + target.name)


def start_folder(target: Path) -> Path:
    """Make :func:`partial_folder`, empty, in the place of one whose writer was interrupted."""
    partial = partial_folder(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish_folder(target: Path) -> None:
    """Give :func:`partial_folder` its name, in the place of an earlier folder.

    The content is on disk before the name is, so that a crash of the machine leaves no incomplete folder.
    """
    partial = partial_folder(target)
    for path in partial.rglob("*"):
        flush(path)
    replaced = _without_name(target) if target.exists() else None
    partial.rename(target)
    flush(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It loses its name first, so that an interrupted removal leaves no incomplete folder."""
    shutil.rmtree(_without_name(folder))


def _without_name(folder: Path) -> Path:
    removing = folder.with_name(REMOVING + folder.name)
    shutil.rmtree(removing, ignore_errors=True)
    return folder.rename(removing)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
