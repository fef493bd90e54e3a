"""Tokenisation of data files into Arrow files: small ones whole, large ones in parts, which an interrupted run keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, PartErrors, RowErrors
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.rows.row_files import FilePart, file_parts
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.utils.files import flush, publish_file, read_bytes
from nemo_kto.utils.hashes import MIN_KEPT_BYTES

if TYPE_CHECKING:
    from nemo_kto.data.tokens.cache import ExampleKind

PARTS = ".parts"  # suffix of the folder with the parts of a file
_BATCH = 1000


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
                    for example in self.kind.examples(batch, self, path, columns, broken):
                        writer.write(example)
            except DataError:  # of a broken row that ends reading, or of a file that cannot be read further
                if not broken.total:
                    raise
                is_last = True
            count, _ = writer.finalize()
        if broken.total:
            examples.unlink()
        return PartResult(rows=count, columns=columns, broken=broken.rows, is_last=is_last)

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
