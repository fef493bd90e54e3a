"""Examples: rows tokenised once, kept in an Arrow file that every rank maps into memory instead of reading it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.chat import EncodedExample, RecordEncoder
from nemo_kto.data.reader import Fields, FileColumns, FileReader
from nemo_kto.data.records import DPORecord, KTORecord, LastRowError, RowError, RowErrors
from nemo_kto.data.truncation import Truncation
from nemo_kto.errors import UserError
from nemo_kto.files import file_hash, make_folder, publish_file
from nemo_kto.locks import one_writer

logger = logging.getLogger(__name__)

_FORMAT = 3  # raise it when the same data and tokenizer give other ids or other columns
_BATCH = 1000
_IDS = Sequence(Value("int32"))
Columns = dict[str, object]  # of one example


@dataclass(frozen=True, kw_only=True)
class ExampleKind:
    """What the rows of a file become.

    Attributes:
        name: begins the names of the cached files.
        features: columns of the cached examples; ``line`` is where an example came from, ``prompt_cut`` and
            ``response_cut`` say what truncation took from.
        read: (reader, file, its columns, to be counted) -> the records of the file.
        tokenise: records -> for each its columns, or why it cannot be used.
    """

    name: str
    features: Features
    read: Callable[[FileReader, Path, FileColumns], Iterator[Any]]
    tokenise: Callable[[list[Any], RecordEncoder, Truncation], Iterator[Columns | RowError]]

    def examples(
        self, records: list[Any], encoder: RecordEncoder, cut: Truncation, path: Path, broken: RowErrors
    ) -> Iterator[Columns]:
        """The columns of the examples of records; those that cannot be used are added to ``broken``.

        Raises:
            DataError: one of them is a LastRowError.
        """
        for record, example in zip(records, self.tokenise(records, encoder, cut), strict=True):
            if isinstance(example, RowError):
                broken.add(path, record.line, str(example))
                if isinstance(example, LastRowError):
                    broken.raise_if_any()
            else:
                yield example


def _tokenise_kto(records: list[KTORecord], encoder: RecordEncoder, cut: Truncation) -> Iterator[Columns | RowError]:
    for record, example in zip(records, encoder.encode(records), strict=True):
        if isinstance(example, EncodedExample):
            prompt, response = cut.truncate(example.prompt_ids, example.response_ids)
            columns: Columns = {"prompt_ids": prompt, "response_ids": response, "desirable": record.desirable}
            cuts = {
                "prompt_cut": len(prompt) < len(example.prompt_ids),
                "response_cut": len(response) < len(example.response_ids),
            }
            yield {**columns, **cuts, "line": record.line}
        else:
            yield example


def _tokenise_dpo(records: list[DPORecord], encoder: RecordEncoder, cut: Truncation) -> Iterator[Columns | RowError]:
    sides = [
        KTORecord(prompt=record.prompt, response=answer, desirable=good, line=record.line, template=record.template)
        for record in records
        for good, answer in ((True, record.chosen), (False, record.rejected))
    ]
    encoded = iter(encoder.encode(sides))
    for record, chosen, rejected in zip(records, encoded, encoded, strict=True):
        if not (isinstance(chosen, EncodedExample) and isinstance(rejected, EncodedExample)):
            yield chosen if isinstance(chosen, RowError) else rejected  # type: ignore[misc]  # one of them is an error
            continue
        prompt, good, bad = cut.truncate_pair(chosen.prompt_ids, chosen.response_ids, rejected.response_ids)
        columns: Columns = {"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad, "line": record.line}
        answers_cut = len(good) < len(chosen.response_ids) or len(bad) < len(rejected.response_ids)
        cuts = {"prompt_cut": len(prompt) < len(chosen.prompt_ids), "response_cut": answers_cut}
        yield {**columns, **cuts, "chosen_reward": record.chosen_reward, "rejected_reward": record.rejected_reward}


_SHARED = {"prompt_ids": _IDS, "prompt_cut": Value("bool"), "response_cut": Value("bool"), "line": Value("int64")}
KTO_EXAMPLES = ExampleKind(
    name="kto",
    features=Features({**_SHARED, "response_ids": _IDS, "desirable": Value("bool")}),
    read=FileReader.kto_records,
    tokenise=_tokenise_kto,
)
DPO_EXAMPLES = ExampleKind(
    name="dpo",
    features=Features(
        {
            **_SHARED,
            "chosen_ids": _IDS,
            "rejected_ids": _IDS,
            "chosen_reward": Value("float64"),
            "rejected_reward": Value("float64"),
        }
    ),
    read=FileReader.dpo_records,
    tokenise=_tokenise_dpo,
)


@dataclass(kw_only=True, eq=False)
class TokenCache:
    """Arrow files of examples, one for each jsonl file, in one folder; beside each a JSON file about its columns.

    A file's name holds a hash of everything that decides its content: path, size and time of change of the data, the
    columns that are renamed, the tokenizer, the length and the truncation. Files appear under their name complete or not
    at all, and are compared with a hash of what was written when they are opened. Any number of processes may read at the
    same time; one writes, and the others wait for it.

    Attributes:
        kind, fields, encoder, truncation: what becomes of a row.
        folder: made if absent.
        shared: others may read the files, as the umask says; else only the user.
    """

    kind: ExampleKind
    folder: Path
    fields: Fields
    encoder: RecordEncoder
    truncation: Truncation
    shared: bool = False

    def __post_init__(self) -> None:
        self._tokenizer_hash = self.encoder.fingerprint()

    def open(self, path: Path, *, broken: RowErrors) -> tuple[Dataset | None, FileColumns]:
        """The examples of a jsonl file, tokenised if they are not yet.

        Returns:
            The memory-mapped examples in the columns of their kind, or None where rows were broken (they are added to
            ``broken``); and the columns of the rows.

        Raises:
            UserError: a cached file cannot be read.
        """
        cached = self.folder / self._name(path)
        if (found := self._read(cached)) is not None:
            return found
        make_folder(self.folder, private=not self.shared)
        with one_writer(cached, private=not self.shared):
            if (found := self._read(cached)) is not None:  # while this process waited
                return found
            columns = FileColumns()
            if not self._write(path, cached, columns, broken):
                return None, columns
            about = {**asdict(columns), "sha256": file_hash(cached)}
            with publish_file(cached.with_suffix(".json"), private=not self.shared) as writing:
                writing.write_text(json.dumps(about), encoding="utf-8")
        return Dataset.from_file(str(cached)), columns

    def _read(self, cached: Path) -> tuple[Dataset, FileColumns] | None:
        """What is cached; None where nothing is, or where it is not what was written and has been removed."""
        about = cached.with_suffix(".json")
        try:
            columns = json.loads(about.read_text(encoding="utf-8"))
            if columns.pop("sha256") == file_hash(cached):
                return Dataset.from_file(str(cached)), FileColumns(**columns)
        except FileNotFoundError:
            return None
        except OSError as error:
            remedy = "make it readable, or choose another model.data.cache_dir"
            raise UserError(f"{error.filename} cannot be read: {error.strerror}; {remedy}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # no JSON, or not ours
        logger.warning("%s is not what was written, and its rows are tokenised again", cached)
        about.unlink(missing_ok=True)
        cached.unlink(missing_ok=True)
        return None

    def _name(self, path: Path) -> str:
        state = path.stat()
        key = [_FORMAT, str(path.resolve()), state.st_size, state.st_mtime_ns, sorted(self.fields.columns.items())]
        key += [self._tokenizer_hash, self.truncation.seq_length, self.truncation.mode]
        return f"{self.kind.name}-{path.stem}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.arrow"

    def _write(self, path: Path, cached: Path, columns: FileColumns, broken: RowErrors) -> bool:
        logger.info("tokenising %s into %s", path, cached)
        before = broken.total
        with publish_file(cached, private=not self.shared) as writing:
            with ArrowWriter(path=str(writing), features=self.kind.features, writer_batch_size=_BATCH) as writer:
                for example in self._examples(path, columns, broken):
                    writer.write(example)
                count, _ = writer.finalize()
            if count == 0 and broken.total == before:
                broken.add(path, 1, "the file must have at least one row, got none; leave it out of data_prefix")
            if broken.total > before:
                writing.unlink()
                return False
        logger.info("tokenised %d rows of %s", count, path)
        return True

    def _examples(self, path: Path, columns: FileColumns, broken: RowErrors) -> Iterator[Columns]:
        records = self.kind.read(FileReader(fields=self.fields, broken=broken), path, columns)
        while batch := list(islice(records, _BATCH)):
            yield from self.kind.examples(batch, self.encoder, self.truncation, path, broken)
