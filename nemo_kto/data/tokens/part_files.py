"""Rows tokenised into Arrow files: small files whole, large ones in parts, which an interrupted run need not do again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, PartErrors
from nemo_kto.data.rows.records import DataError, RowErrors
from nemo_kto.data.tokens.chat import RecordEncoder
from nemo_kto.data.tokens.parts import FilePart, file_parts
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.utils.files import flush, publish_file
from nemo_kto.utils.hashes import MIN_KEPT_BYTES

if TYPE_CHECKING:
    from nemo_kto.data.tokens.cache import Columns, ExampleKind

PARTS = ".parts"  # ends the name of the folder of a file's parts
_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """What was found in a part of a file.

    Attributes:
        rows: examples, or pairs.
        columns: of the rows.
        broken: line of each broken row, and what is wrong with it.
        is_last: no further part should be read, see ``records.LastRowError``.
    """

    rows: int
    columns: FileColumns
    broken: list[tuple[int, str]]
    is_last: bool

    def add_to(self, path: Path, columns: FileColumns, broken: RowErrors) -> None:
        """Add what was found in this part to that of the file.

        Raises:
            DataError: this is the last part.
        """
        columns.merge(self.columns)
        for line, what in self.broken:
            broken.add(path, line, what)
        if self.is_last:
            broken.raise_if_any()


@dataclass(frozen=True, kw_only=True)
class Tokeniser:
    """Tokenises rows into Arrow files, in any process.

    Attributes:
        kind, fields, encoder, truncation: what becomes of a row.
        private: only the user may read the files.
    """

    kind: ExampleKind
    fields: Fields
    encoder: RecordEncoder
    truncation: Truncation
    private: bool

    def write(self, path: Path, part: FilePart, examples: Path) -> PartResult:
        """Tokenise a part of the rows in ``path`` into the file ``examples``, which is removed if rows are broken."""
        columns, broken, count, is_last = FileColumns(), PartErrors(), 0, False
        with ArrowWriter(path=str(examples), features=self.kind.features, writer_batch_size=_BATCH) as writer:
            try:
                for example in self._examples(path, part, columns, broken):
                    writer.write(example)
            except DataError:
                is_last = True
            count, _ = writer.finalize()
        if broken.total:
            examples.unlink()
        return PartResult(rows=count, columns=columns, broken=broken.rows, is_last=is_last)

    def _examples(self, path: Path, part: FilePart, columns: FileColumns, broken: RowErrors) -> Iterator[Columns]:
        records = self.kind.read(FileReader(fields=self.fields, broken=broken), path, columns, part)
        while batch := list(islice(records, _BATCH)):
            yield from self.kind.examples(batch, self.encoder, self.truncation, path, broken)


@dataclass(frozen=True, kw_only=True)
class FilesWriter:
    """Tokenises whole small files, each into a file of its own, in any process.

    Such a file appears at once, without a wait for the disk: its content is compared with a hash whenever it is opened. A
    larger one, whose hash is kept, is on disk first.
    """

    tokeniser: Tokeniser

    def __call__(self, files: Sequence[tuple[Path, Path]]) -> list[PartResult]:
        """Tokenise files: (rows, where the examples go), up to one whose result ``is_last``.

        Nothing is written of a file with broken rows.

        Raises:
            DataError: a file cannot be opened, or is of another format.
        """
        results: list[PartResult] = []
        for path, target in files:
            results.append(self._write(path, target))
            if results[-1].is_last:
                break
        return results

    def _write(self, path: Path, target: Path) -> PartResult:
        with publish_file(target, private=self.tokeniser.private, durable=False) as writing:
            # its only part: if the file grows meanwhile, it is refused as changed
            result = self.tokeniser.write(path, next(file_parts(path)), writing)
            if writing.exists() and writing.stat().st_size >= MIN_KEPT_BYTES:
                flush(writing)
        return result


@dataclass(frozen=True, kw_only=True)
class PartWriter:
    """Tokenises parts of a large file, each into a file of its own, in any process.

    Attributes:
        path: of the rows.
        folder: of the files, which must exist. They appear complete or not at all, and are not written again.
    """

    tokeniser: Tokeniser
    path: Path
    folder: Path

    def __call__(self, part: FilePart) -> PartResult:
        """Tokenise a part, unless that is done; nothing is written if rows are broken."""
        examples, about = self._file(part.number), self._file(part.number).with_suffix(".json")
        if (found := _read_whole(examples, about)) is not None:
            return found
        with publish_file(examples, private=self.tokeniser.private) as writing:
            result = self.tokeniser.write(self.path, part, writing)
            size = writing.stat().st_size if writing.exists() else 0
        if not result.broken:
            known = {"rows": result.rows, "bytes": size, "columns": asdict(result.columns)}
            with publish_file(about, private=self.tokeniser.private) as writing:
                writing.write_text(json.dumps(known), encoding="utf-8")
        return result

    def assemble(self, target: Path, *, parts: int) -> None:
        """Make one file of so many parts."""
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


def _read_whole(examples: Path, about: Path) -> PartResult | None:
    """What is known of a part that is done; None where it is not, or not as it was written."""
    try:
        found = json.loads(about.read_text(encoding="utf-8"))
        if examples.stat().st_size == found["bytes"]:
            return PartResult(rows=found["rows"], columns=FileColumns(**found["columns"]), broken=[], is_last=False)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None
