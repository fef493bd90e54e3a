"""File I/O: validated reads of untrusted files, YAML of limited size, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from nemo_kto.errors import UserError, show
from nemo_kto.redaction import redacted_file_text

if TYPE_CHECKING:
    import yaml

_OUTSIDE = "copy it into the folder, or download the model again"
_UNPUBLISHED = re.compile(r"\.(.+)-[0-9a-f]{32}")
WRITING, REMOVING = ".writing-", ".removing-"  # prefixes of the names of incomplete folders
MAX_FILE_BYTES = 2**28  # limit for files read as a whole; the largest tokenizer.json has a tenth of this size
MAX_LINE_BYTES = 2**26  # limit for one line; a row of ten million tokens fits
_MAX_YAML_BYTES = 2**20
_MAX_YAML_VALUES = 50_000  # a configuration has a hundredth of this number
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, and limits of a user and of a process
_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
# First bytes of files in other formats; the first match counts.
_FORMATS: tuple[tuple[bytes | tuple[bytes, ...], str], ...] = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer; run `git lfs pull` in the clone that it is from"),
    (b"\x1f\x8b", "compressed with gzip; decompress it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; decompress it with unzstd"),
    (b"\xfd7zXZ\0", "compressed with xz; decompress it with unxz"),
    (b"BZh", "compressed with bzip2; decompress it with bunzip2"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"PAR1", "a Parquet file; convert it with pandas.read_parquet(FILE).to_json(NEW, orient='records', lines=True)"),
    (b"ARROW1", "an Arrow file; convert it with datasets.Dataset.from_file(FILE).to_json(NEW)"),
    (b"GGUF", "a GGUF model; take the model's safetensors files"),
    ((b"\x80\x02", b"\x80\x04"), "a pickle; write the file again in its own format"),
    ((b"\xff\xfe\0\0", b"\0\0\xfe\xff"), "UTF-32 text; convert it with iconv -f UTF-32 -t UTF-8"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8"),
    (b"{\0", "UTF-16 text; convert it with iconv -f UTF-16LE -t UTF-8"),
    (b"\0{", "UTF-16 text; convert it with iconv -f UTF-16BE -t UTF-8"),
    ((b"<!doctype html", b"<html"), "a web page; download the file itself"),
)


def open_file(file: str | Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading; OSError otherwise, whose ``strerror`` tells the cases apart.

    Other kinds are rejected without blocking: a FIFO would block until it has a writer, and a device may never end.
    """
    _check_regular(file, os.stat(file))  # before opening, because opening alone can move a device
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(file, os.fstat(handle))
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check_regular(file: str | Path, found: os.stat_result) -> None:
    if (kind := _kind(found)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind} and must be a regular file", str(file))


def _kind(found: os.stat_result) -> str | None:
    return None if stat.S_ISREG(found.st_mode) else _KINDS.get(stat.S_IFMT(found.st_mode), "of an unknown kind")


def irregular(file: Path) -> str | None:
    """Return the kind of a file that is not regular, such as "a folder"; None if it is regular or does not exist."""
    try:
        return _kind(os.stat(file))
    except (OSError, ValueError):  # ValueError: the name has a null byte
        return None


def read_bytes(file: str | Path, *, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; OSError otherwise, as in :func:`open_file`."""
    with open_file(file) as handle:
        size = os.fstat(handle.fileno()).st_size
        content = handle.read(limit + 1) if size <= limit else b""
    if max(size, len(content)) > limit:
        text = f"it must have at most {limit:,} bytes, got {max(size, len(content)):,}"
        raise OSError(errno.EFBIG, text, str(file))
    return content


def read_lines(handle: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file; of a line above MAX_LINE_BYTES, yield its first MAX_LINE_BYTES + 1 bytes and stop."""
    while line := handle.readline(MAX_LINE_BYTES + 1):
        yield line
        if len(line) > MAX_LINE_BYTES:
            return


def other_format(start: bytes) -> str | None:
    """Return name and remedy of a well-known format detected from the first bytes of a file; None if none matches."""
    text = start.lstrip().lower() if start[:1] in b"< \r\n\t" else start
    return next((message for magic, message in _FORMATS if text.startswith(magic)), None)


def read_json(file: Path, *, remedy: str = "download or write it again") -> dict[str, Any]:
    """Read the JSON object in an untrusted file; on failure raise a UserError with the file and the remedy."""
    try:
        raw = read_bytes(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    if (message := other_format(raw)) is not None:
        raise UserError(f"{file} must be JSON, but it is {message}")
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise UserError(f"{file} is not valid JSON: {error}; {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must be a JSON object, got {type(content).__name__}; {remedy}")
    return content


def refuse_code(file: Path, content: Mapping[str, object]) -> None:
    """Raise a UserError if the classes of a model or tokenizer configuration are Python files shipped with the model."""
    if content.get("auto_map"):
        raise UserError(
            f"{file}: auto_map must not be set, got {show(content['auto_map'])}: code that comes with a model is not run; "
            "choose another model, or remove auto_map if transformers has the same classes itself"
        )


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a model folder; UserError if the file, or the target of its link, is outside the model.

    A link may point to another file in the folder. In Hugging Face's cache it may point to the blobs of the same model
    (models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH). The folder itself may be a link.
    """
    if "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise UserError(f"{folder} must contain all its files, got {name!r}, which is outside; {_OUTSIDE}")
    path, root = folder / name, Path(os.path.realpath(folder))
    roots = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        roots.append(root.parent.parent / "blobs")
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(each) for each in roots):
        raise UserError(f"{path} must be a file of its folder, got a link to {target}, which is outside; {_OUTSIDE}")
    return path


def make_folder(folder: Path, *, private: bool) -> None:
    """Create a folder and its missing parents; with ``private``, only the user may access those created."""
    absent = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(absent):
        each.mkdir(mode=0o700 if private else 0o777, exist_ok=True)


@contextlib.contextmanager
def publish_file(target: Path, *, private: bool = False, durable: bool = True) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename it to ``target`` at the end of the block.

    No file appears if the block raises or removes the temporary file. Any number of processes may publish the same file at
    the same time. With ``private``, only the user may read the file, also while it is written. With ``durable``, the content
    is flushed to disk before the rename, so that after a crash of the machine ``target`` is either the complete new file or
    the previous one; False is for a file whose content is verified at every read.
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


@contextlib.contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Raise a UserError with the remedy if the disk of the cache ``folder`` is full in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        text = f"{error.filename or folder} cannot be written: {os.strerror(error.errno)}"
        raise UserError(f"{text}; free space, or set model.data.cache_dir to a folder on another disk") from error


def remove_unpublished(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove temporary files of :func:`publish_file` that killed processes left in a folder.

    ``names``: names of the published files; None for all. No process may be writing these files now.
    """
    for path in folder.iterdir():
        left = _UNPUBLISHED.fullmatch(path.name)
        if left and (names is None or left[1] in names) and path.is_file():
            path.unlink(missing_ok=True)


def partial_folder(target: Path) -> Path:
    """Return the path where a folder is written before it is renamed to ``target``."""
    return target.with_name(WRITING + target.name)


def start_folder(target: Path) -> Path:
    """Create an empty :func:`partial_folder`, replacing one whose writer was interrupted."""
    partial = partial_folder(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish_folder(target: Path) -> None:
    """Rename :func:`partial_folder` to ``target``, replacing an earlier folder.

    The content is flushed to disk before the rename, so that a crash of the machine leaves no incomplete folder.
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
    """Remove a folder; it is renamed first, so that an interrupted removal leaves no incomplete folder under its name."""
    shutil.rmtree(_without_name(folder))


def _without_name(folder: Path) -> Path:
    removing = folder.with_name(REMOVING + folder.name)
    shutil.rmtree(removing, ignore_errors=True)
    return folder.rename(removing)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_yaml(text: str | bytes) -> Any:
    """Return the content of a YAML document of plain values; raise ValueError if it is invalid or too large.

    A few nested aliases stand for billions of values, and an anchor that contains its own alias for an endless number.
    """
    import yaml  # not where a command only reads other files

    if len(text) > _MAX_YAML_BYTES:
        raise ValueError(f"it must have at most {_MAX_YAML_BYTES:,} bytes, got {len(text):,}")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > _MAX_YAML_VALUES:
            raise ValueError(f"it must have at most {_MAX_YAML_VALUES:,} values, with those that aliases stand for")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # PyYAML's
        raise ValueError(f"it has a value that its tag does not fit ({error!r})") from error


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values of a node with its aliases replaced; infinity if it contains itself."""
    import yaml

    if id(node) not in known:
        known[id(node)] = math.inf  # until its parts are counted
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        is_scalar = isinstance(node, yaml.ScalarNode)
        known[id(node)] = 1 + (0 if is_scalar else sum(_expanded_size(part, known) for part in parts))
    return known[id(node)]


def redact_file(file: Path) -> None:
    """Redact the secrets in another program's text file, if it exists."""
    if file.is_file() and (public := redacted_file_text(text := file.read_text(encoding="utf-8"))) != text:
        with publish_file(file) as writing:
            writing.write_text(public, encoding="utf-8")
