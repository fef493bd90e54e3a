"""Data of model.data.data_prefix: files and shares of the splits, and rows that are passed to the Python interface."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_kto.data.rows.forms import COMPRESSED, SUFFIXES, argument_file
from nemo_kto.data.rows.records import DataError
from nemo_kto.errors import UserError, either, printable, show
from nemo_kto.utils.files import file_inside, make_folder, publish_file, read_json
from nemo_kto.utils.hashes import file_hash
from nemo_kto.utils.intervals import MIN_VALIDATION_ROWS

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
WHOLE = "all"
UNNAMED = ""  # key of a validation set that has no name
AUTO = "auto"  # value of splits_string
_SET_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_SHARD = re.compile(r"-\d+-of-\d+")  # ends the names of files of a split, as in train-00000-of-00002.parquet
_HUB = re.compile(
    r"hf:(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>(?!.*\.\.)\w[\w./-]*))?(:(?P<first>\w[\w.-]*))?"
    r"(:(?P<second>\w[\w.-]*))?",
    re.ASCII,
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # in folders that save_to_disk wrote
_IDENTITY = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified")  # of a file at a web address
_AUTO_PART, _AUTO_MAX_PART, _AUTO_MAX = 100, 10, 10_000  # the usual and the largest part of the rows, and most rows


@dataclass(frozen=True)
class Source:
    """Files (at least one) that are read in sequence; ``weight`` is their share of a blend, None without a blend."""

    files: tuple[Path, ...]
    weight: Fraction | None


def read_data_prefix(data_prefix: object) -> dict[str, tuple[Source, ...]]:
    """Return split -> sources: either the single key ``WHOLE`` (not yet split), or the ``SPLITS`` that have data.

    ``data_prefix`` is a data file; a folder (its data files in the order of their names, or those named train, validation
    and test as splits; or one that ``save_to_disk`` of datasets wrote); a data set of the Hugging Face hub,
    hf:ORG/NAME[@REVISION][:CONFIG][:SPLIT]; the URL of a file; a list of these; a list of alternating weights and these; or
    a mapping from "train", "validation" and "test" to any of these. The value of "validation" may also be a mapping from
    the names of several validation sets to any of these; their keys are then given by :func:`validation_split`.

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
    if isinstance(data_prefix, str | Path) and (named := _named_splits(data_prefix)):
        return {split: (Source(files, None),) for split, files in named.items()}
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

    With ``AUTO`` the last hundredth of the rows is used for validation, but at least 20 and at most 10,000 rows, and none if
    20 are more than a tenth. 10,000 rows are enough to see a difference, and the cost of validation stays bounded.
    """
    shares = read_splits_string(splits_string)
    if shares is not None:
        return shares
    validation = min(max(num_rows // _AUTO_PART, MIN_VALIDATION_ROWS), _AUTO_MAX)
    share = Fraction(validation if validation * _AUTO_MAX_PART <= num_rows else 0, num_rows)
    return 1 - share, share, Fraction(0)


def _validation_sets(data_prefix: object) -> dict[str, object]:
    """Return the data_prefix of each named validation set; empty if there are none."""
    sets = data_prefix.get("validation") if isinstance(data_prefix, Mapping) else None
    return {str(name): value for name, value in sets.items() if value} if isinstance(sets, Mapping) else {}


def _named_splits(name: str | Path) -> dict[str, tuple[Path, ...]]:
    """Return the files of each split of a folder, or of a data set with several splits; empty if the files name none."""
    text, folder = str(name), Path(name)
    if is_remote(text):
        splits = _hub_splits(text) if text.startswith("hf:") else {}
        named, others = ({}, []) if len(splits) == 1 else (splits, sorted(splits.keys() - set(SPLITS)))
    elif (folder / _SAVED_SPLITS).is_file():
        splits = {str(split): data_files(folder / str(split)) for split in _saved_names(folder)}
        named, others = splits, sorted(splits.keys() - set(SPLITS))
    else:
        named, others = {}, []
        for file in data_files(folder) if folder.is_dir() and not (folder / _SAVED).is_file() else ():
            split = _SHARD.sub("", file.name.split(".")[0])
            if split in SPLITS:
                named[split] = (*named.get(split, ()), file)
            else:
                others.append(file.name)
        if named and others:
            raise DataError(
                f"{folder} must contain either train.jsonl, validation.jsonl and test.jsonl or files of other names, got "
                f"{', '.join(named)} and {', '.join(others)}; move one kind away or name the files in data_prefix"
            )
        return named
    if others:
        first, separator = min(named), ":" if is_remote(text) else "/"
        raise DataError(
            f"{text} must have the splits {either(SPLITS)}, got {', '.join(named)}; name one of them, such as "
            f"{text}{separator}{first}, or several as {{train: {text}{separator}{first}, validation: ...}}"
        )
    return named


def _saved_names(folder: Path) -> list[object]:
    names = read_json(folder / _SAVED_SPLITS).get("splits")
    if (
        not names
        or not isinstance(names, list)
        or not all(isinstance(name, str) and file_inside(folder, name) for name in names)
    ):
        raise DataError(
            f"{folder / _SAVED_SPLITS} must list splits, got {names!r}; write the folder again with save_to_disk"
        )
    return names


def is_remote(name: str) -> bool:
    """Return whether data is downloaded: a data set of the hub or a URL."""
    return name.startswith("hf:") or _URL.match(name) is not None


@cache  # the command line is checked by several rules
def _hub_splits(name: str) -> dict[str, tuple[Path, ...]]:
    """Download a data set of the hub, unless it is in the cache of datasets, and return the Arrow files of its splits."""
    if (parts := _HUB.fullmatch(name)) is None:
        raise DataError(f"a data set of the hub must be hf:ORG/NAME[@REVISION][:CONFIG][:SPLIT], got {name}")
    repository, revision, config, split = parts["name"], parts["revision"], parts["first"], parts["second"]
    if os.path.lexists(repository):  # datasets would read it
        text = f"a data set of the hub must not have the name of a folder here, got {name} and the folder {repository}"
        raise DataError(f"{text}; write {repository} for the folder, or start in another folder")
    import datasets

    try:
        if split is None and config is not None:  # one of them is left out
            configs = datasets.get_dataset_config_names(repository, revision=revision)
            config, split = (config, None) if config in configs else (None, config)
        found = datasets.load_dataset(repository, config, revision=revision)
    except Exception as error:  # network, hub and data may fail in any way
        remedy = "correct the name, or log in with `hf auth login` if the data set is private or gated"
        if datasets.config.HF_HUB_OFFLINE:
            remedy = "unset HF_HUB_OFFLINE, or run this command once on a machine with a network and the same HF_HOME"
        raise DataError(f"{name} cannot be loaded: {printable(str(error))}; {remedy}") from error
    splits = {str(name): tuple(Path(file["filename"]) for file in each.cache_files) for name, each in found.items()}
    if split is not None and split not in splits:
        raise DataError(f"{name} must name one of the splits {either(list(splits))}, got {split}")
    return splits if split is None else {split: splits[split]}


@cache
def _downloaded(url: str) -> Path:
    """Download a file, unless this version of it is in the cache of datasets, and return its path.

    Where its storage cannot be reached, such as on the nodes of a cluster, this is the version that was downloaded last.
    """
    import datasets
    import fsspec

    versions = Path(datasets.config.HF_DATASETS_CACHE, "nemo_kto", hashlib.sha256(url.encode()).hexdigest()[:24])
    try:
        system, path = fsspec.core.url_to_fs(url)
        name = PurePosixPath(path).name or "rows"
        try:
            about = system.info(path)
        except Exception:  # fsspec does not tell a missing file from a missing network
            if known := sorted(versions.glob(f"*/{glob.escape(name)}"), key=lambda file: file.stat().st_mtime_ns):
                logger.warning("%s cannot be read now; the copy of an earlier download is used", url)
                return known[-1]
            raise
        version = [system.ukey(path), *map(about.get, _IDENTITY)]  # for a web address the key depends on the address only
        file = versions / hashlib.sha256(f"{version}".encode()).hexdigest()[:24] / name
        if not file.exists():
            make_folder(file.parent, private=True)
            with publish_file(file, private=True) as writing:
                system.get_file(path, str(writing))
    except ImportError as error:  # fsspec names the package
        raise DataError(f"{url} cannot be read: {printable(str(error))}") from error
    except Exception as error:  # each kind of storage has errors of its own
        message = f"{url} cannot be read: {printable(str(error) or type(error).__name__)}"
        raise DataError(f"{message}; correct the address or the credentials") from error
    return file


def data_files(name: str | Path) -> tuple[Path, ...]:
    """Return the data files with a name, at least one: a file, or those of a folder or of a data set of the hub."""
    text, path = str(name), Path(name)
    if text.startswith("hf:"):
        splits = _hub_splits(text)
        if len(splits) > 1:
            raise DataError(f"{text} must name one of its splits, got {', '.join(splits)}; e.g. {text}:{min(splits)}")
        return next(iter(splits.values()))
    if is_remote(text):
        return (_downloaded(text),)
    if not path.is_dir():
        if not path.exists():  # anything but a regular file is refused when it is opened
            raise DataError(f"data_prefix names {path}, which does not exist")
        return (path,)
    if (path / _SAVED).is_file():
        saved = read_json(path / _SAVED).get("_data_files")
        try:
            files = tuple(file_inside(path, str(each["filename"])) for each in saved or [])
        except (TypeError, LookupError):
            files = ()
        if not files:
            text = f"must list data files in _data_files, got {show(saved)}; write the folder again with save_to_disk"
            raise DataError(f"{path / _SAVED} {text}")
        return files
    if (path / _SAVED_SPLITS).is_file():
        names = ", ".join(f"{path}/{split}" for split in _saved_names(path))
        raise DataError(f"{path} must be one split of a data set, got a folder of splits; name one of {names}")
    by_suffix: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        ending = file.name.lower()
        for compressed in COMPRESSED:
            ending = ending.removesuffix(compressed)
        if (suffix := next((each for each in SUFFIXES if ending.endswith(each)), None)) is not None:
            by_suffix.setdefault(suffix, []).append(file)
    if not by_suffix:
        raise DataError(f"the folder {path} must contain data files ({', '.join(SUFFIXES)}), got none")
    if ".jsonl" not in by_suffix and len(by_suffix) > 1:
        by_suffix.pop(".json", None)  # often describes the other files
    if ".jsonl" not in by_suffix and len(by_suffix) > 1:
        got = f"got {', '.join(by_suffix)}; name the files in data_prefix"
        raise DataError(f"the folder {path} must contain data files of one form, {got}")
    return tuple(next(by_suffix[suffix] for suffix in SUFFIXES if suffix in by_suffix))


def _sources(value: object) -> tuple[Source, ...]:
    if isinstance(value, str | Path):
        return (Source(data_files(value), None),)
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"data_prefix must name a file, a folder or a list of them, got {value!r}")
    if _weight(value[0]) is None:
        if wrong := [item for item in value if not isinstance(item, str | Path)]:
            raise DataError(f"data_prefix must be a list of files, or of weight, file, weight, file; got {wrong[0]!r}")
        return tuple(Source(data_files(item), None) for item in value)
    if len(value) % 2:
        raise DataError(f"a blend must alternate weight and file, got {len(value)} entries: {list(value)!r}")
    sources = []
    for given, path in zip(value[::2], value[1::2], strict=True):
        weight = _weight(given)
        if weight is None or weight <= 0 or not isinstance(path, str | Path):
            got = f"got {given!r}, {path!r}; leave out files without a share"
            raise DataError(f"a blend must alternate a weight above 0 and a file, {got}")
        sources.append(Source(data_files(path), weight))
    return tuple(sources)


def _weight(value: object) -> Fraction | None:
    """Return the weight exactly as written (0.7 is 7/10, not the nearest binary number); None if it is not a number."""
    try:
        return None if isinstance(value, bool | Path) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        return None


_BATCH = 1000


class _Tables(NamedTuple):
    schema: pyarrow.Schema  # with the features of the datasets library, such as the names of class labels
    tables: Iterable[pyarrow.Table]


def data_prefix_of(data: Any, folder: Path, name: str = "data") -> object:
    """Return the value of model.data.data_prefix for the argument ``data``, whose rows are written to files in ``folder``.

    A file is named after the argument, for messages, and the hash of its content, so that equal rows are written once.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, Mapping):
        return {key: data_prefix_of(part, folder, f"{name}.{key}") for key, part in data.items()}
    if isinstance(data, list | tuple) and all(isinstance(item, str | Path | int | float) for item in data):
        return list(data)
    make_folder(folder, private=False)
    with publish_file(folder / "rows", private=True) as writing:
        if (found := _tables_of(data, name)) is None:
            with writing.open("wb") as file:
                file.writelines(_lines(_rows_of(data), name))
        else:
            import pyarrow

            with pyarrow.OSFile(str(writing), "wb") as sink, pyarrow.ipc.new_stream(sink, found.schema) as stream:
                for table in found.tables:
                    stream.write_table(table)
        return str(writing.replace(folder / argument_file(name, file_hash(writing))))


def _tables_of(data: Any, name: str) -> _Tables | None:
    """Return the content of a Dataset, a DataFrame or an Arrow table; None for rows that are not of one type by column."""
    if hasattr(data, "with_format"):  # of the datasets library; a transform is applied only to single rows
        is_transformed = getattr(data, "format", {}).get("type") == "custom"
        if data.features is None or is_transformed:
            return None
        schema = data.features.arrow_schema
        return _Tables(schema, (table.cast(schema) for table in data.with_format("arrow").iter(_BATCH)))
    if not (is_pandas := hasattr(data, "iloc")) and not hasattr(data, "__arrow_c_stream__"):
        return None
    import pyarrow

    names = list(map(str, data.columns)) if is_pandas else []
    if twice := [each for each in names if names.count(each) > 1]:
        raise UserError(f"{name} must name each column once, got {show(twice[0])} twice; rename one")
    try:
        table = pyarrow.Table.from_pandas(data, preserve_index=False) if is_pandas else pyarrow.table(data)
    except (pyarrow.ArrowException, ValueError, TypeError):  # texts and messages in one column, for example
        return None
    return _Tables(table.schema, [table])


def _rows_of(data: Any) -> Iterable[object]:
    if hasattr(data, "iloc"):
        return data.to_dict("records")
    if not isinstance(data, Iterable):
        kinds = "a path, a list of mappings, a datasets.Dataset, a DataFrame, or a mapping of splits"
        raise UserError(f"data must be {kinds}, got {show(data)}")
    return data


def _lines(rows: Iterable[object], name: str) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"{name} must have mappings from column to value as rows, got {show(row)} as row {number}")
        # a missing value of a DataFrame is NaN
        values = {column: None if isinstance(value, float) and value != value else value for column, value in row.items()}
        try:
            yield json.dumps(values, ensure_ascii=False, allow_nan=False, default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            reason = "a lone surrogate" if isinstance(error, UnicodeEncodeError) else error
            text = f"must have strings, numbers, lists and mappings as values, got {reason} in row {number}"
            raise UserError(f"{name} {text}; convert or remove it") from error


def _plain(value: Any) -> object:
    if hasattr(value, "tolist"):  # an array or a number of numpy
        return value.tolist()
    if type(value).__name__ in ("NAType", "NaTType"):  # a missing value of pandas
        return None
    raise TypeError(show(value))
