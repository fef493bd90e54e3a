"""The examples of a file, tokenised a part at a time: a run that was interrupted begins where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.chat import RecordEncoder
from nemo_kto.data.parts import FilePart
from nemo_kto.data.reader import Fields, FileColumns, FileReader, PartErrors
from nemo_kto.data.records import DataError, RowErrors
from nemo_kto.data.truncation import Truncation
from nemo_kto.files import publish_file

if TYPE_CHECKING:
    from nemo_kto.data.cache import Columns, ExampleKind

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
class PartWriter:
    """Tokenises parts of a file, each into a file of its own, in any process.

    Attributes:
        kind, fields, encoder, truncation: what becomes of a row.
        path: of the rows.
        folder: of the files, which must exist. They appear complete or not at all, and are not written again.
        private: only the user may read them.
    """

    kind: ExampleKind
    path: Path
    folder: Path
    fields: Fields
    encoder: RecordEncoder
    truncation: Truncation
    private: bool

    def __call__(self, part: FilePart) -> PartResult:
        """Tokenise a part, unless that is done; nothing is written if rows are broken."""
        examples, about = self._file(part.number), self._file(part.number).with_suffix(".json")
        if (found := _read_whole(examples, about)) is not None:
            return found
        columns, broken, count, is_last = FileColumns(), PartErrors(), 0, False
        with publish_file(examples, private=self.private) as writing:
            with ArrowWriter(path=str(writing), features=self.kind.features, writer_batch_size=_BATCH) as writer:
                try:
                    for example in self._examples(part, columns, broken):
                        writer.write(example)
                except DataError:
                    is_last = True
                count, _ = writer.finalize()
            if broken.total:
                writing.unlink()
            size = 0 if broken.total else writing.stat().st_size
        if not broken.total:
            with publish_file(about, private=self.private) as writing:
                writing.write_text(json.dumps({"rows": count, "bytes": size, "columns": asdict(columns)}), encoding="utf-8")
        return PartResult(rows=count, columns=columns, broken=broken.rows, is_last=is_last)

    def assemble(self, target: Path, *, parts: int) -> None:
        """Make one file of so many parts."""
        files = [self._file(number) for number in range(parts)]
        with publish_file(target, private=self.private) as writing, pyarrow.OSFile(str(writing), "wb") as sink:
            with pyarrow.ipc.open_stream(pyarrow.memory_map(str(files[0]))) as first:
                schema = first.schema
            with pyarrow.ipc.new_stream(sink, schema) as stream:
                for file in files:
                    with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as batches:
                        for batch in batches:
                            stream.write_batch(batch)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.arrow"

    def _examples(self, part: FilePart, columns: FileColumns, broken: RowErrors) -> Iterator[Columns]:
        records = self.kind.read(FileReader(fields=self.fields, broken=broken), self.path, columns, part)
        while batch := list(islice(records, _BATCH)):
            yield from self.kind.examples(batch, self.encoder, self.truncation, self.path, broken)


def _read_whole(examples: Path, about: Path) -> PartResult | None:
    """What is known of a part that is done; None where it is not, or not as it was written."""
    try:
        found = json.loads(about.read_text(encoding="utf-8"))
        if examples.stat().st_size == found["bytes"]:
            return PartResult(rows=found["rows"], columns=FileColumns(**found["columns"]), broken=[], is_last=False)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None
