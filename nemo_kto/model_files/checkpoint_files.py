"""Files of our own checkpoints, read and verified without megatron-core, which loads them.

trainer.json has the size and the SHA-256 of every other file, and a SHA-256 of itself. Its values are validated, because a
checkpoint from someone else can contain anything.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Lt
from pydantic import BaseModel, ConfigDict, Field

from nemo_kto.architecture.config_fields import ABSENT
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.errors import UserError
from nemo_kto.utils.fields import check, file_errors
from nemo_kto.utils.files import read_bytes
from nemo_kto.utils.hashes import file_hash
from nemo_kto.utils.intervals import has_enough_rows

CHECKPOINTS = "checkpoints"  # name of the folder of checkpoints in the folder of a run
INFO = "trainer.json"
_NAME = re.compile(r"step_(\d+)")
_REMEDY = "take another checkpoint of the run"
_THREADS = 8  # hashlib releases the GIL
# Errors that mean a file is gone or has become unreadable. Any other error, such as a missing permission or a server that
# does not answer, does not show that the file is damaged.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENAMETOOLONG)
Count = Annotated[int, Ge(0), Lt(2**63)]
Positive = Annotated[int, Ge(1), Lt(2**63)]
Numbers = Annotated[dict[str, float], Field(description="an object of floats")]
_STRICT = ConfigDict(strict=True, protected_namespaces=(), defer_build=True)


class Written(NamedTuple):
    """Size in bytes and SHA-256 of a file when it was written."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its folder, and the content of its trainer.json."""

    folder: Path
    step: int  # 0 if the folder's name is not the one that a run gives it
    info: Mapping[str, Any]  # has the fields of :class:`Info`
    files: Mapping[str, Written]  # size and hash of every other file when it was written

    def files_in(self, *folders: str) -> dict[str, Written]:
        """Return the entries of files in some folders of the checkpoint, such as state."""
        starts = tuple(f"{folder}/" for folder in folders)
        return {name: record for name, record in self.files.items() if name.startswith(starts)}


class DamagedCheckpoint(ValueError):
    """A checkpoint is not as it was written; the message names the damage."""


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one of our own checkpoints."""
    return os.path.isfile(folder / INFO)


def config_folder(source: Path) -> Path:
    """Return the folder with a model's configuration and tokenizer: ``source``, or ``hf`` in a checkpoint."""
    return source / "hf" if is_checkpoint(source) else source


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint in the folder of checkpoints."""
    return folder / f"step_{step:06d}"


def named_checkpoints(folder: Path) -> dict[Path, int]:
    """Return all paths named like a checkpoint, complete or not, with their steps, oldest first; UserError if unreadable."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unreadable(folder, error) from error
    steps = {folder / name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first: all files exist with their sizes. Contents are not read.

    Raises UserError if a file cannot be accessed, which does not mean that it is damaged.
    """
    found = map(read_or_damage, named_checkpoints(folder))  # damage is reported when a run looks for one to resume from
    return [checkpoint for checkpoint in found if isinstance(checkpoint, Checkpoint)]


def best_of(checkpoints: Sequence[Checkpoint], *, monitor: str, mode: str) -> Checkpoint | None:
    """Return the checkpoint with the best metric ``monitor``, the newest among equals; None if none has it.

    ``mode`` is 'min' or 'max': whether small or large values are better.
    """
    ranked = [each for each in checkpoints if each.info["metrics"].get(monitor) is not None]
    return min(ranked, key=lambda each: rank_by(each, monitor, mode), default=None)


def is_reliable(checkpoint: Checkpoint, monitor: str) -> bool:
    """Return whether a metric comes from a validation with enough rows."""
    metrics = checkpoint.info["metrics"]
    of_sets = [name for name in metrics if name.endswith("_rows") and monitor.startswith(name.removesuffix("rows"))]
    # the longest, as one name of a set may begin with another: a, a_b
    return has_enough_rows(metrics.get(max(of_sets, key=len, default="")))


def rank_by(checkpoint: Checkpoint, monitor: str, mode: str) -> tuple[float, int]:
    """Return the sort key of a checkpoint: smaller is better, and newer is better among equals."""
    value, sign = checkpoint.info["metrics"].get(monitor), 1.0 if mode == "min" else -1.0
    return (math.inf if value is None else sign * value, -checkpoint.step)


def read_or_damage(folder: Path) -> Checkpoint | str:
    """Return a checkpoint, or a description of the damage to its trainer.json or to the sizes of its files."""
    try:
        return read_checkpoint(folder)
    except DamagedCheckpoint as error:
        return str(error)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the trainer.json of a checkpoint and check the sizes of its files.

    Raises DamagedCheckpoint if the checkpoint is not as it was written, UserError if a file cannot be accessed.
    """
    with _reading(folder, INFO):
        _status(folder, INFO)
        content = read_bytes(folder / INFO)
    try:
        info = json.loads(content.decode("utf-8"))
        if not isinstance(info, dict):
            raise DamagedCheckpoint(f"{INFO} is not a JSON object")
        if "checksum" in info and info["checksum"] != _checksum(info):
            raise DamagedCheckpoint(f"{INFO} was changed after it was written")
    except DamagedCheckpoint:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{INFO} is not valid JSON") from error
    named = _NAME.fullmatch(folder.name)
    step = int(named[1]) if named else None
    if wrong := find_wrong(info, step=step):
        raise DamagedCheckpoint(f"{INFO} is not valid: {'; '.join(wrong)}")
    if outside := [name for name in info["files"] if os.path.isabs(name) or ".." in Path(name).parts]:
        raise DamagedCheckpoint(f"{INFO} must list files of its own folder, got {outside[0]!r}, which is outside")
    files = {name: Written(entry["size"], entry["sha256"]) for name, entry in info["files"].items()}
    for name, record in files.items():
        _check_size(folder, name, record)
    return Checkpoint(folder=folder, step=step or 0, info=info, files=files)


def damage(folder: Path, records: Mapping[str, Written]) -> list[str]:
    """Read files of a checkpoint and return a message about each that was changed; UserError if one cannot be read."""

    def of_file(item: tuple[str, Written]) -> str | None:
        name, record = item
        try:
            _check_size(folder, name, record)
            with _reading(folder, name):
                if hash_file(folder / name) != record:
                    return f"{name} was changed after it was written"
        except DamagedCheckpoint as error:
            return str(error)
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        return [*filter(None, pool.map(of_file, records.items()))]


def hash_file(file: Path) -> Written:
    """Return the size and hash of a file."""
    return Written(file.stat().st_size, file_hash(file))


def size_text(count: int) -> str:
    """Format a number of bytes in GB or MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def info_text(info: Mapping[str, Any]) -> str:
    """Return the text of a trainer.json, with the hash of all its other content."""
    return json.dumps({**info, "checksum": _checksum(info)}, indent=2)


def check_checkpoint(folder: Path) -> Path | None:
    """Verify a checkpoint's trainer.json and hf folder, and the sizes of the other files; return the base model of adapters.

    None is returned for a checkpoint of all weights. Raises UserError if trainer.json is not as this program writes it, or a
    file is missing or damaged; names it.
    """
    found = read_or_damage(folder)
    refuse_damaged(folder, [found] if isinstance(found, str) else damage(folder, found.files_in("hf")))
    adapters = None if isinstance(found, str) else found.info.get("adapters")
    return None if adapters is None else Path(str(adapters["base_model"]))


def refuse_damaged(folder: Path, wrong: list[str]) -> None:
    """Raise a UserError with the first message in ``wrong``, if any: the checkpoint is not as it was written."""
    if wrong:
        raise UserError(f"{folder} must be as it was written, but {wrong[0]}; {_REMEDY}")


def _checksum(info: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in info.items() if name != "checksum"}
    if isinstance(adapters := rest.get("adapters"), dict):  # the user may edit the path of the base model
        rest["adapters"] = {name: value for name, value in adapters.items() if name != "base_model"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    """Turn an OSError about a file of a checkpoint into a DamagedCheckpoint, or a UserError if it is no sign of damage."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise _unreadable(folder / name, error) from error
        problem = "is missing" if error.errno in (errno.ENOENT, errno.ENOTDIR) else f"cannot be read ({error.strerror})"
        raise DamagedCheckpoint(f"{name} {problem}") from error


def _status(folder: Path, name: str) -> os.stat_result:
    """Return the status of a regular file; others are rejected, because reading one, such as a fifo, may never end."""
    try:
        found = os.stat(folder / name)
    except ValueError as error:  # a null byte in the name
        raise DamagedCheckpoint(f"{name!r} is not a valid file name") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpoint(f"{name} is not a regular file")
    return found


def _check_size(folder: Path, name: str, record: Written) -> None:
    with _reading(folder, name):
        found = _status(folder, name)
    if found.st_size != record.size:
        raise DamagedCheckpoint(f"{name} has {found.st_size} bytes instead of {record.size}")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}; give this user permission to read it, or check the disk")


def _are_totals(values: dict[str, list[Any]]) -> bool:
    return all(
        len(total) == 2 and type(total[0]) in (int, float) and type(total[1]) is int and 0 < total[1] < 2**63
        for total in values.values()
    )


def _are_facts(values: dict[str, Any]) -> bool:
    """Return whether each value is a plain value, or an object with a content hash and its origin (sha256, from)."""
    contents = [value for value in values.values() if isinstance(value, dict)]
    return all(isinstance(content.get(name), str) for content in contents for name in ("sha256", "from"))


def _are_adapters(value: dict[str, Any] | None) -> bool:
    try:
        return value is None or (isinstance(value["base_model"], str) and adapter_settings(value) is not None)
    except (LookupError, TypeError, ValueError, AttributeError):
        return False


class _Unlogged(BaseModel):
    """Sums since the last line of the log."""

    model_config = _STRICT
    steps: Count
    seconds: float
    sums: Numbers
    totals: Annotated[dict[str, list[Any]], check(_are_totals, "be an object of sums with their counts")]
    newest: Numbers


class _BestValidation(BaseModel):
    """State of the best validation, and of early stopping."""

    model_config = _STRICT
    monitor: str
    mode: str
    waited: Count
    is_finite: bool
    best: float | None
    best_step: Count | None


class _Trainer(BaseModel):
    model_config = _STRICT
    step: Count
    epoch: Count = 0
    consumed_samples: Count = 0
    steps_per_epoch: Count = 0
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    validation_due: Count = 0
    unlogged: Annotated[_Unlogged, Field(description="an object")] = ABSENT
    objective: Annotated[dict[str, Any], Field(description="an object")] = {}
    best_validation: Annotated[_BestValidation, Field(description="an object")] = ABSENT
    early_stopping: Annotated[_BestValidation, Field(description="an object")] = ABSENT


class _File(BaseModel):
    model_config = _STRICT
    size: Count
    sha256: str


class Info(BaseModel):
    """Content of a trainer.json; full models lack adapters."""

    model_config = _STRICT
    trainer: Annotated[_Trainer, Field(description="an object")]
    metrics: Annotated[dict[str, float | None], Field(description="an object of floats")]
    dtype: Literal["bfloat16", "float32"]
    layout: Annotated[dict[str, Positive], Field(description="an object of integers above 0")]
    files: Annotated[dict[str, _File], Field(description="an object of sizes and hashes of files")]
    distributed_optimizer: bool = False
    moving_reference: bool = False
    original: str | None = None
    adapters: Annotated[
        dict[str, Any] | None,
        check(_are_adapters, ""),
        Field(description="the base model and the settings of adapters, or null"),
    ] = None
    run: Annotated[
        dict[str, Any], check(_are_facts, ""), Field(description="an object of values that a resumed run is compared with")
    ] = {}
    versions: Annotated[dict[str, str], Field(description="an object of strings")] = {}


def adapter_settings(adapters: Mapping[str, Any]) -> LoRASettings:
    """Build the settings from the ``adapters`` of a trainer.json; invalid content raises various Python exceptions."""
    kept = adapters["settings"].items()
    settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in kept}
    return LoRASettings(**settings)


def find_wrong(info: Mapping[str, Any], *, step: int | None) -> list[str]:
    """Return a message about each value of a trainer.json that this program would not write.

    ``step`` is the one in the name of the checkpoint's folder; None if the folder has another name.
    """
    trainer = info.get("trainer")
    if isinstance(trainer, dict):  # these are empty if there is nothing to record
        empty = [name for name in ("unlogged", "early_stopping") if trainer.get(name) == {}]
        info = {**info, "trainer": {name: value for name, value in trainer.items() if name not in empty}}
    if wrong := [*file_errors(Info, info).values()]:
        return wrong
    taken, consumed = info["trainer"]["step"], info["trainer"].get("consumed_samples")
    if step is not None and taken != step:
        wrong.append(f"trainer.step must be the {step} of the folder's name, got {taken}")
    if consumed is not None and (consumed % taken or not consumed if taken else consumed):
        wrong.append(f"trainer.consumed_samples must be a multiple of trainer.step, {taken}, got {consumed}")
    return wrong
