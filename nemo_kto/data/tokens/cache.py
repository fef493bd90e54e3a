"""Tokenisation of data files into a cache of Arrow files that every rank memory-maps; large files are tokenised in parts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow
from datasets import Features, Value
from datasets import Sequence as SequenceOf
from datasets.arrow_writer import ArrowWriter
from datasets.table import MemoryMappedTable, Table

from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, PartErrors, RowErrors
from nemo_kto.data.rows.records import CONTRADICTIONS, DUPLICATES, DataError, DPORecord, KTORecord, LastRowError, RowError
from nemo_kto.data.rows.row_files import FilePart, file_parts, number_of_parts
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.data.tokens.workers import map_parts, number_of_processes, size_groups
from nemo_kto.errors import UserError
from nemo_kto.utils.files import flush, make_folder, publish_file, read_bytes, remove_unpublished, writing_cache
from nemo_kto.utils.hashes import MIN_KEPT_BYTES, hash_once, stored_hash
from nemo_kto.utils.locks import one_writer

PARTS = ".parts"  # suffix of the folder with the parts of a file
_BATCH = 1000
_IDS = SequenceOf(Value("int32"))
Columns = dict[str, object]  # column name -> value, for one example
Tokenised = tuple[list[EncodedExample], Columns] | RowError


@dataclass(frozen=True, kw_only=True)
class ExampleKind:
    """Kind of examples: how the rows of a file are read, tokenised and stored."""

    name: str  # prefix of the names of the cached files
    features: Features  # of the cached examples; ``prompt_cut`` and ``response_cut``: whether it was truncated
    read: Callable[[FileReader, Path, FileColumns, FilePart], Iterator[Any]]  # updates the column counts
    tokenise: Callable[[list[Any], RecordEncoder, Truncation], Iterator[Tokenised]]  # one item per record


def _tokenise_kto(records: list[KTORecord], encoder: RecordEncoder, cut: Truncation) -> Iterator[Tokenised]:
    for record, example in zip(records, encoder.encode(records), strict=True):
        if isinstance(example, RowError):
            yield example
            continue
        prompt, response = cut.truncate(example.prompt_ids, example.response_ids)
        columns: Columns = {
            "prompt_ids": prompt,
            "response_ids": response,
            "prompt_cut": len(prompt) < len(example.prompt_ids),
            "response_cut": len(response) < len(example.response_ids),
            "desirable": record.desirable,
            "line": record.line,
            "weight": record.weight,
        }
        yield [example], columns


def _tokenise_dpo(records: list[DPORecord], encoder: RecordEncoder, cut: Truncation) -> Iterator[Tokenised]:
    encoded = iter(encoder.encode([side for record in records for side in record.sides]))
    for record, chosen, rejected in zip(records, encoded, encoded, strict=True):
        if isinstance(chosen, RowError) or isinstance(rejected, RowError):
            yield chosen if isinstance(chosen, RowError) else rejected  # type: ignore[misc]  # one of them is an error
            continue
        prompt, good, bad = cut.truncate_pair(chosen.prompt_ids, chosen.response_ids, rejected.response_ids)
        columns: Columns = {
            "prompt_ids": prompt,
            "chosen_ids": good,
            "rejected_ids": bad,
            "prompt_cut": len(prompt) < len(chosen.prompt_ids),
            "response_cut": len(good) < len(chosen.response_ids) or len(bad) < len(rejected.response_ids),
            "chosen_reward": record.chosen_reward,
            "rejected_reward": record.rejected_reward,
            "line": record.line,
            "weight": record.weight,
        }
        yield [chosen, rejected], columns


_FLAG, _INTEGER, _FLOAT = Value("bool"), Value("int64"), Value("float64")
_SHARED = {"prompt_ids": _IDS, "prompt_cut": _FLAG, "response_cut": _FLAG, "line": _INTEGER, "weight": _FLOAT}
_REWARDS = {"chosen_reward": _FLOAT, "rejected_reward": _FLOAT}
KTO_EXAMPLES = ExampleKind(
    name="kto",
    features=Features({**_SHARED, "response_ids": _IDS, "desirable": _FLAG}),
    read=FileReader.kto_records,
    tokenise=_tokenise_kto,
)
DPO_EXAMPLES = ExampleKind(
    name="dpo",
    features=Features({**_SHARED, "chosen_ids": _IDS, "rejected_ids": _IDS, **_REWARDS}),
    read=FileReader.dpo_records,
    tokenise=_tokenise_dpo,
)


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """Result of tokenising a part of a file into ``rows`` examples, or pairs."""

    rows: int
    columns: FileColumns
    broken: list[tuple[int, str]]  # line and error of each broken row
    is_last: bool  # no further part should be read, see ``records.LastRowError``

    def add_to(self, path: Path, columns: FileColumns, broken: RowErrors) -> None:
        """Add the columns and broken rows to those of the file; DataError if this is the last part and rows are broken."""
        columns.merge(self.columns)
        for line, what in self.broken:
            broken.add(path, line, what)
        if self.is_last:
            broken.raise_if_any()


@dataclass(frozen=True, kw_only=True)
class Tokeniser:
    """Tokeniser of rows into Arrow files, which only the user can read if ``private`` is set; usable in any process."""

    kind: ExampleKind
    fields: Fields
    encoder: RecordEncoder
    truncation: Truncation
    private: bool
    max_rows: int | None = None  # read from each part

    def write_part(self, path: Path, part: FilePart, examples: Path) -> PartResult:
        """Tokenise a part of ``path`` into the file ``examples``, which is removed if any row is broken."""
        columns, broken, is_last = FileColumns(), PartErrors(), False
        records = self.kind.read(FileReader(fields=self.fields, broken=broken, max_rows=self.max_rows), path, columns, part)
        with ArrowWriter(path=str(examples), features=self.kind.features, writer_batch_size=_BATCH) as writer:
            try:
                while batch := list(islice(records, _BATCH)):
                    for example in self.examples(batch, path, columns, broken):
                        writer.write(example)
            except DataError:  # of a broken row that ends reading, or of a file that cannot be read further
                if not broken.total:
                    raise
                is_last = True
            count, _ = writer.finalize()
        if broken.total:
            examples.unlink()
        return PartResult(rows=count, columns=columns, broken=broken.rows, is_last=is_last)

    def examples(self, records: list[Any], path: Path, columns: FileColumns, broken: RowErrors) -> Iterator[Columns]:
        """Yield the columns of usable records; DataError if an error is a LastRowError.

        Others are added to ``broken``, or counted in ``columns`` if they are of a kind that is left out.
        """
        drop, tokenised = self.fields.drop, self.kind.tokenise(records, self.encoder, self.truncation)
        for record, example in zip(records, tokenised, strict=True):
            if not isinstance(example, RowError):
                answers, of_example = example
                if columns.keeps(answers, drop):
                    yield of_example
            elif not columns.leaves_out(example, drop):
                broken.add(path, record.line, str(example))
                if isinstance(example, LastRowError):
                    broken.raise_if_any()

    def write_files(self, files: Sequence[tuple[Path, Path]]) -> list[PartResult]:
        """Tokenise (data file, target file) for small files, up to and including the first whose result has ``is_last`` set.

        Nothing is written for a file with broken rows. A file is published without waiting for the disk, because its content
        is compared with a hash whenever it is opened; a larger file, whose hash is stored, is flushed to disk first.
        """
        results: list[PartResult] = []
        for path, target in files:
            with publish_file(target, private=self.private, durable=False) as writing:
                # the file has a single part; if it grows meanwhile, the caller refuses it as changed
                results.append(self.write_part(path, next(file_parts(path)), writing))
                if writing.exists() and writing.stat().st_size >= MIN_KEPT_BYTES:
                    flush(writing)
            if results[-1].is_last:
                break
        return results


@dataclass(frozen=True, kw_only=True)
class PartWriter:
    """Writer that tokenises the parts of the large file ``path`` into one file each, usable in any process.

    The files are published atomically in ``folder``, which exists, and are not written again.
    """

    tokeniser: Tokeniser
    path: Path
    folder: Path

    def __call__(self, part: FilePart) -> PartResult:
        """Tokenise a part, unless its file already exists; nothing is written if rows are broken."""
        examples = self._file(part.number)
        about = examples.with_suffix(".json")
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # not finished, or not as it was written
            known = json.loads(read_bytes(about))
            if examples.stat().st_size == known["bytes"]:
                return PartResult(rows=known["rows"], columns=FileColumns(**known["columns"]), broken=[], is_last=False)
        with publish_file(examples, private=self.tokeniser.private) as writing:
            result = self.tokeniser.write_part(self.path, part, writing)
            size = writing.stat().st_size if writing.exists() else 0
        if not result.broken:
            known = {"rows": result.rows, "bytes": size, "columns": asdict(result.columns)}
            with publish_file(about, private=self.tokeniser.private) as writing:
                writing.write_text(json.dumps(known), encoding="utf-8")
        return result

    def assemble(self, target: Path, *, parts: int) -> None:
        """Concatenate the files of the first ``parts`` parts into the file ``target``."""
        files = [self._file(number) for number in range(parts)]
        with publish_file(target, private=self.tokeniser.private) as writing, pyarrow.OSFile(str(writing), "wb") as sink:
            with pyarrow.ipc.open_stream(pyarrow.memory_map(str(files[0]))) as first:
                schema = first.schema
            with pyarrow.ipc.new_stream(sink, schema) as stream:
                for file in files:
                    with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as batches:
                        for batch in batches:
                            stream.write_batch(batch)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.arrow"


logger = logging.getLogger(__name__)

_FORMAT = 9  # increase it if the same data and tokenizer give other token ids or columns
_NOT_CONTENT = ("line", "prompt_cut", "response_cut")  # origin of an example, and whether it was truncated
_DROPPED_LATER = {DUPLICATES, CONTRADICTIONS}  # the cached files have them
Item = TypeVar("Item")
Result = TypeVar("Result")


Opened = tuple[Table | None, FileColumns]
"""Memory-mapped examples, or None if rows were broken, and the columns of the rows."""


class Progress(Protocol):
    """Progress display: yields the items of an iterable and shows how many have been processed."""

    def __call__(self, items: Iterable[Item], *, total: int, title: str) -> Iterator[Item]: ...


def show_nothing(items: Iterable[Item], *, total: int, title: str) -> Iterator[Item]:
    yield from items


@dataclass(kw_only=True, eq=False)
class TokenCache:
    """Cache of examples: one Arrow file per data file, in one folder, each with a JSON file about its columns.

    The file name contains a hash of everything that determines the content: name and content of the data, the renamed
    columns, the tokenizer, the sequence length and the truncation. Files are published atomically. When a file
    is opened, it is compared with the hash of the content that was written; a large file is read for this only once, until
    it changes. Any number of processes may read at the same time; one process writes while the others wait for it.
    """

    kind: ExampleKind
    folder: Path  # created if absent
    fields: Fields
    encoder: RecordEncoder
    truncation: Truncation
    shared: bool = False  # files have the permissions of the umask; otherwise only the user may read them
    verified: bool = False  # another process on this machine has just compared the hashes; this one does not
    preprocess_workers: int | None = 1  # maximum; None: one per core that this process may use
    max_rows: int | None = None  # read only the first rows of each file; for a folder without files of whole data
    progress: Progress = show_nothing

    def __post_init__(self) -> None:
        self._private, self._tokenizer_hash = not self.shared, self.encoder.fingerprint()
        self._tokeniser = Tokeniser(
            kind=self.kind,
            fields=self.fields,
            encoder=self.encoder,
            truncation=self.truncation,
            private=self._private,
            max_rows=self.max_rows,
        )

    def open(self, paths: Sequence[Path], *, broken: RowErrors) -> dict[Path, Opened]:
        """Return memory-mapped examples and columns of data files, which are tokenised first unless they are cached.

        The examples of a file with broken rows, which are added to ``broken``, are None. Raises UserError if a cached file
        cannot be read, or the disk is full.
        """
        with writing_cache(self.folder):
            return self._open(paths, broken)

    def _open(self, paths: Sequence[Path], broken: RowErrors) -> dict[Path, Opened]:
        cached = {path: self.folder / self._name(path) for path in paths}
        opened = {path: found for path in paths if (found := self._read(cached[path])) is not None}
        if absent := [path for path in cached if path not in opened]:
            logger.info("tokenising %s into %s", _names(absent), self.folder)
            make_folder(self.folder, private=self._private)
            request = hashlib.sha256(json.dumps([file.name for file in cached.values()]).encode()).hexdigest()[:24]
            for is_large, group in groupby(absent, key=lambda path: self.max_rows is None and number_of_parts(path) > 1):
                files = {path: cached[path] for path in group}
                opened |= self._open_large(files, broken) if is_large else self._open_small(files, request, broken)
            rows = sum(len(table) for table, _ in (opened[path] for path in absent) if table is not None)
            logger.info("tokenised %d rows of %s", rows, _names(absent))
        return {path: opened[path] for path in paths}

    def _open_large(self, files: Mapping[Path, Path], broken: RowErrors) -> dict[Path, Opened]:
        """Return the examples of files that are tokenised in parts; each file is written by at most one process."""
        opened = {}
        for path, cached in files.items():
            with one_writer(cached, private=self._private):
                if (found := self._read(cached)) is None:  # else another process has written it meanwhile
                    try:
                        found = self._write_parts(path, cached, broken)
                    except FileNotFoundError:  # of a part: without file locks, another process may have finished first
                        if (found := self._read(cached)) is None:
                            raise
                opened[path] = found
        return opened

    def _write_parts(self, path: Path, cached: Path, broken: RowErrors) -> Opened:
        writer = PartWriter(tokeniser=self._tokeniser, path=path, folder=cached.with_suffix(PARTS))
        make_folder(writer.folder, private=self._private)
        before, columns, rows, parts, expected = broken.total, FileColumns(), 0, 0, number_of_parts(path)
        results = self._map(writer, file_parts(path), number=expected, what=path.name)
        try:
            for result in self.progress(results, total=expected, title=f"tokenising {path.name}"):
                result.add_to(path, columns, broken)
                rows, parts = rows + result.rows, parts + 1
            self._check_file(path, cached, columns, rows=rows, broken=broken, before=before)
        except DataError:
            shutil.rmtree(writer.folder, ignore_errors=True)
            raise
        table = None
        if broken.total == before:
            writer.assemble(cached, parts=parts)
            table = self._complete(cached, columns)
        shutil.rmtree(writer.folder, ignore_errors=True)
        return table, columns

    def _open_small(self, files: Mapping[Path, Path], request: str, broken: RowErrors) -> dict[Path, Opened]:
        """Return the examples of files with one part each; of the processes with the same request one writes at a time."""
        what = _names(list(files))
        with one_writer(self.folder / f"{self.kind.name}-files-{request}", private=self._private):
            opened = {path: found for path, cached in files.items() if (found := self._read(cached)) is not None}
            absent = [(path, cached) for path, cached in files.items() if path not in opened]
            remove_unpublished(self.folder, {cached.name for _, cached in absent})
            groups = list(size_groups(absent, lambda file: file[0].stat().st_size))
            done = self._map(self._tokeniser.write_files, groups, number=len(groups), what=what)
            results: Iterator[PartResult] = chain.from_iterable(done)
            if len(groups) > 1:
                results = self.progress(results, total=len(absent), title=f"tokenising {what}")
            for (path, cached), result in zip(absent, results, strict=False):  # the results end after ``is_last``
                columns, before, table = FileColumns(), broken.total, None
                try:
                    result.add_to(path, columns, broken)
                    self._check_file(path, cached, columns, rows=result.rows, broken=broken, before=before)
                    if broken.total == before:
                        table = self._complete(cached, columns)
                finally:
                    if table is None:
                        cached.unlink(missing_ok=True)
                opened[path] = table, columns
        return opened

    def _map(self, work: Callable[[Item], Result], items: Iterable[Item], *, number: int, what: str) -> Iterator[Result]:
        processes = number_of_processes(self.preprocess_workers, number)
        doing, setting = f"tokenising {what}", "model.data.preprocess_workers"
        return map_parts(work, items, processes=processes, doing=doing, setting=setting)

    def _check_file(
        self, path: Path, cached: Path, columns: FileColumns, *, rows: int, broken: RowErrors, before: int
    ) -> None:
        """Add wrong labels, or a file without rows, to ``broken``; DataError if the file was changed while it was read."""
        if self._name(path) != cached.name:
            raise DataError(f"{path} was changed while it was read; start the run again when the file is complete")
        columns.add_label_errors(path, self.fields.labels, broken)
        if rows == 0 and broken.total == before:
            broken.add(path, 1, columns.no_rows())

    def _complete(self, cached: Path, columns: FileColumns) -> Table:
        """Write the JSON file of a cached file, which marks it as complete, and open the cached file."""
        about = {**asdict(columns), "sha256": hash_once(cached, cache_dir=self.folder, private=self._private)}
        is_large = cached.stat().st_size >= MIN_KEPT_BYTES  # tokenising a small file again is fast
        with publish_file(cached.with_suffix(".json"), private=self._private, durable=is_large) as writing:
            writing.write_text(json.dumps(about), encoding="utf-8")
        return MemoryMappedTable.from_file(str(cached))

    def _read(self, cached: Path) -> Opened | None:
        """Open a cached file; None if it is absent, or if its content is not as written, in which case it is removed."""
        about = cached.with_suffix(".json")
        try:
            columns = json.loads(read_bytes(about))
            sha256 = columns.pop("sha256")
            if self.verified or sha256 == hash_once(cached, cache_dir=self.folder, private=self._private):
                return MemoryMappedTable.from_file(str(cached)), FileColumns(**columns)
        except FileNotFoundError:
            return None
        except OSError as error:
            remedy = "make it readable, or choose another model.data.cache_dir"
            raise UserError(f"{error.filename} cannot be read: {error.strerror}; {remedy}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # not JSON, or written by another program
        logger.warning("%s is damaged; tokenising its rows again", cached)
        about.unlink(missing_ok=True)
        cached.unlink(missing_ok=True)
        return None

    def _name(self, path: Path) -> str:
        if self.max_rows is None:
            content = hash_once(path, cache_dir=self.folder, private=self._private)
        else:  # a folder for one use
            content = ""
        # the suffix of a csv file may determine its form
        fields = self.fields
        key = [_FORMAT, path.name, content, fields.json_columns, sorted(fields.columns.items()), asdict(fields.labels)]
        key += [sorted(set(fields.drop) - _DROPPED_LATER)]
        key += [self._tokenizer_hash, self.truncation.seq_length, self.truncation.mode]
        return f"{self.kind.name}-{path.stem}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.arrow"


def _names(paths: Sequence[Path]) -> str:
    return paths[0].name if len(paths) == 1 else f"{len(paths):,} files ({paths[0].name} and others)"


def examples_hash(files: Sequence[Path], index: np.ndarray) -> str:
    """Return a hash of the examples at the positions ``index`` [N] (int64) of the concatenated files of ``TokenCache``.

    It covers token ids, labels, rewards and weights, and does not depend on how a file groups them. The hash of each large
    file is stored next to it; it stays valid because the file name identifies everything that the file was made from.
    """
    whole = hashlib.sha256()
    for file in files:
        state = file.stat()
        if state.st_size < MIN_KEPT_BYTES:
            content = _content_hash(file)
        else:
            stored, private = file.parent / "hashes" / f"{file.stem}.sha256", not state.st_mode & 0o077  # as the file itself
            content = stored_hash(stored, partial(_content_hash, file), private=private)
        whole.update(content.encode())
    whole.update(np.ascontiguousarray(index, dtype="<i8").tobytes())
    return whole.hexdigest()


def _content_hash(file: Path) -> str:
    table, whole = MemoryMappedTable.from_file(str(file)), hashlib.sha256()
    for name in sorted(set(table.column_names) - set(_NOT_CONTENT)):
        chunks, lengths, values = table.column(name).chunks, hashlib.sha256(), hashlib.sha256()
        if name == "weight" and all((chunk.to_numpy(zero_copy_only=False) == 1).all() for chunk in chunks):
            continue  # rows without a weight and rows of weight 1 are the same training data
        for chunk in chunks:
            if hasattr(chunk, "value_lengths"):  # one list per example
                lengths.update(np.ascontiguousarray(chunk.value_lengths().to_numpy(), dtype="<i8").tobytes())
                chunk = chunk.flatten()
            array = np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False))
            assert array.dtype != object, f"{chunk.type} has no bytes of its own"
            values.update(array.tobytes())
        whole.update(f"{name} {lengths.hexdigest()}{values.hexdigest()}\n".encode())
    return whole.hexdigest()
