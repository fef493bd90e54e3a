"""Tokenisation of data files into Arrow files: small ones whole, large ones in parts, which an interrupted run keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Features, Value
from datasets import Sequence as SequenceOf
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, PartErrors, RowErrors
from nemo_kto.data.rows.records import DataError, DPORecord, KTORecord, LastRowError, RowError
from nemo_kto.data.rows.row_files import FilePart, file_parts
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.utils.files import flush, publish_file, read_bytes
from nemo_kto.utils.hashes import MIN_KEPT_BYTES

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
