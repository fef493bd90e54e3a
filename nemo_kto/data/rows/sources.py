"""Data files named by model.data.data_prefix, and the shares of the splits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from nemo_kto.data.rows.records import DataError

SPLITS = ("train", "validation", "test")
WHOLE = "all"
UNNAMED = ""  # key of a validation set that has no name
AUTO = "auto"  # value of splits_string
_SET_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_AUTO_PART, _AUTO_MIN, _AUTO_MAX = 100, 2, 10_000


@dataclass(frozen=True)
class Source:
    """Files (at least one) that are read in sequence; ``weight`` is their share of a blend, None without a blend."""

    files: tuple[Path, ...]
    weight: Fraction | None


def read_data_prefix(data_prefix: object) -> dict[str, tuple[Source, ...]]:
    """Return split -> sources: either the single key ``WHOLE`` (not yet split), or the ``SPLITS`` that have data.

    ``data_prefix`` is a jsonl file; a folder (its jsonl files in the order of their names, or train.jsonl, validation.jsonl
    and test.jsonl as splits); a list of files and folders; a list of alternating weights and files; or a mapping from
    "train", "validation" and "test" to any of these. The value of "validation" may also be a mapping from the names of
    several validation sets to any of these; their keys are then given by :func:`validation_split`.

    Raises DataError if a path does not exist, or ``data_prefix`` has none of these forms.
    """
    if isinstance(data_prefix, Mapping):
        unknown = sorted(set(map(str, data_prefix)) - set(SPLITS))
        if unknown:
            raise DataError(f"data_prefix must have the keys {', '.join(SPLITS)}, got {', '.join(unknown)}")
        check_validation_names(data_prefix)
        given = {str(split): value for split, value in data_prefix.items() if value}
        if isinstance(given.get("validation"), Mapping):
            del given["validation"]
            given |= {validation_split(name): value for name, value in _validation_sets(data_prefix).items()}
        return {split: _sources(value) for split, value in given.items()}
    if isinstance(data_prefix, Sequence) and len(data_prefix) == 1 and not isinstance(data_prefix, str):
        data_prefix = data_prefix[0]
    if isinstance(data_prefix, str | Path) and (named := _named_splits(Path(data_prefix))):
        return named
    return {WHOLE: _sources(data_prefix)}


def validation_names(data_prefix: object) -> tuple[str, ...]:
    """Return the names of the validation sets, without reading files; only ``UNNAMED`` if ``data_prefix`` names none."""
    return tuple(_validation_sets(data_prefix)) or (UNNAMED,)


def validation_split(name: str) -> str:
    """Return the split name of a validation set, such as validation.helpful."""
    return f"validation.{name}" if name else "validation"


def check_validation_names(data_prefix: object) -> None:
    """Raise a DataError if names of validation sets cannot be part of metric names."""
    if wrong := [name for name in _validation_sets(data_prefix) if not _SET_NAME.fullmatch(name)]:
        got = ", ".join(map(repr, wrong))
        raise DataError(
            f"data_prefix must name validation sets with letters, digits and underscores, got {got}; rename them"
        )


def read_splits_string(splits_string: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """Return the shares of train, validation and test, which sum to 1; None for ``AUTO``, see :func:`split_shares`.

    Raises ValueError unless there are one to three numbers of at least 0, the first above 0.
    """
    if splits_string == AUTO:
        return None
    try:
        parts = [Fraction(part.strip()) for part in str(splits_string).split(",")]
    except (ValueError, ZeroDivisionError):
        parts = []
    if not 1 <= len(parts) <= len(SPLITS) or min(parts) < 0 or parts[0] == 0:
        raise ValueError(
            f'splits_string must be auto, or up to three numbers, the first above 0, such as "98,2", got {splits_string!r}'
        )
    train, validation, test = [part / sum(parts) for part in (*parts, Fraction(0), Fraction(0))[: len(SPLITS)]]
    return train, validation, test


def split_shares(splits_string: str, num_rows: int) -> tuple[Fraction, Fraction, Fraction]:
    """Return the shares of train, validation and test for a source with ``num_rows`` rows (at least 1); they sum to 1.

    With ``AUTO`` the last hundredth of the rows is used for validation, but at most 10,000 rows, and none if it would be
    fewer than 2 rows. 10,000 rows are enough to see a difference, and the cost of validation stays bounded for large data.
    """
    shares = read_splits_string(splits_string)
    if shares is not None:
        return shares
    validation = min(num_rows // _AUTO_PART, _AUTO_MAX)
    share = Fraction(validation if validation >= _AUTO_MIN else 0, num_rows)
    return 1 - share, share, Fraction(0)


def _validation_sets(data_prefix: object) -> dict[str, object]:
    """Return the data_prefix of each named validation set; empty if there are none."""
    sets = data_prefix.get("validation") if isinstance(data_prefix, Mapping) else None
    return {str(name): value for name, value in sets.items() if value} if isinstance(sets, Mapping) else {}


def _named_splits(folder: Path) -> dict[str, tuple[Source, ...]]:
    """Return the sources of a folder whose files are named after splits; empty for any other folder or a file."""
    files = _files(folder) if folder.is_dir() else ()
    named: dict[str, tuple[Source, ...]] = {file.stem: (Source((file,), None),) for file in files if file.stem in SPLITS}
    others = [file.name for file in files if file.stem not in SPLITS]
    if named and others:
        raise DataError(
            f"{folder} must contain either train.jsonl, validation.jsonl and test.jsonl or files of other names, got "
            f"{', '.join(named)} and {', '.join(others)}; move one kind away or name the files in data_prefix"
        )
    return named


def _sources(value: object) -> tuple[Source, ...]:
    if isinstance(value, str | Path):
        return (Source(_files(Path(value)), None),)
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"data_prefix must name a file, a folder or a list of them, got {value!r}")
    if _weight(value[0]) is None:
        if wrong := [item for item in value if not isinstance(item, str | Path)]:
            raise DataError(f"data_prefix must be a list of files, or of weight, file, weight, file; got {wrong[0]!r}")
        return tuple(Source(_files(Path(item)), None) for item in value)
    if len(value) % 2:
        raise DataError(f"a blend must alternate weight and file, got {len(value)} entries: {list(value)!r}")
    sources = []
    for given, path in zip(value[::2], value[1::2], strict=True):
        weight = _weight(given)
        if weight is None or weight <= 0 or not isinstance(path, str | Path):
            got = f"got {given!r}, {path!r}; leave out files without a share"
            raise DataError(f"a blend must alternate a weight above 0 and a file, {got}")
        sources.append(Source(_files(Path(path)), weight))
    return tuple(sources)


def _weight(value: object) -> Fraction | None:
    """Return the weight exactly as written (0.7 is 7/10, not the nearest binary number); None if it is not a number."""
    try:
        return None if isinstance(value, bool | Path) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        return None


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        files = tuple(sorted(path.glob("*.jsonl")))
        if not files:
            raise DataError(f"the folder {path} must contain jsonl files, got none")
        return files
    if not path.exists():  # anything but a regular file is refused when it is opened
        raise DataError(f"data_prefix names {path}, which does not exist")
    return (path,)
