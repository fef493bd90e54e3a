"""Examples: rows tokenised once, kept in an Arrow file that every rank maps into memory instead of reading it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from datasets import Dataset, Features, Sequence, Value

from nemo_kto.data.chat import EncodedExample, RecordEncoder
from nemo_kto.data.part_files import PARTS, PartWriter
from nemo_kto.data.parts import FilePart, file_parts, map_parts, number_of_parts, number_of_processes
from nemo_kto.data.reader import Fields, FileColumns, FileReader
from nemo_kto.data.records import DataError, DPORecord, KTORecord, LastRowError, RowError, RowErrors
from nemo_kto.data.truncation import Truncation
from nemo_kto.errors import UserError
from nemo_kto.files import file_hash, make_folder, publish_file
from nemo_kto.locks import one_writer

logger = logging.getLogger(__name__)

_FORMAT = 4  # raise it when the same data and tokenizer give other ids or other columns
_IDS = Sequence(Value("int32"))
Columns = dict[str, object]  # of one example
Item = TypeVar("Item")


class Progress(Protocol):
    """Passes items on and shows how many of them have passed."""

    def __call__(self, items: Iterable[Item], *, total: int, title: str) -> Iterator[Item]: ...


def show_nothing(items: Iterable[Item], *, total: int, title: str) -> Iterator[Item]:
    """The items."""
    yield from items


@dataclass(frozen=True, kw_only=True)
class ExampleKind:
    """What the rows of a file become.

    Attributes:
        name: begins the names of the cached files.
        features: columns of the cached examples; ``line`` is where an example came from, ``prompt_cut`` and
            ``response_cut`` say what truncation took from.
        read: (reader, file, its columns, to be counted, a part of it) -> the records of the part.
        tokenise: records -> for each its columns, or why it cannot be used.
    """

    name: str
    features: Features
    read: Callable[[FileReader, Path, FileColumns, FilePart], Iterator[Any]]
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
            yield {**columns, **cuts, "line": record.line, "weight": record.weight}
        else:
            yield example


def _tokenise_dpo(records: list[DPORecord], encoder: RecordEncoder, cut: Truncation) -> Iterator[Columns | RowError]:
    encoded = iter(encoder.encode([side for record in records for side in record.sides]))
    for record, chosen, rejected in zip(records, encoded, encoded, strict=True):
        if not (isinstance(chosen, EncodedExample) and isinstance(rejected, EncodedExample)):
            yield chosen if isinstance(chosen, RowError) else rejected  # type: ignore[misc]  # one of them is an error
            continue
        prompt, good, bad = cut.truncate_pair(chosen.prompt_ids, chosen.response_ids, rejected.response_ids)
        columns: Columns = {"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad, "line": record.line}
        answers_cut = len(good) < len(chosen.response_ids) or len(bad) < len(rejected.response_ids)
        cuts = {"prompt_cut": len(prompt) < len(chosen.prompt_ids), "response_cut": answers_cut}
        rewards = {"chosen_reward": record.chosen_reward, "rejected_reward": record.rejected_reward}
        yield {**columns, **cuts, **rewards, "weight": record.weight}


_SHARED = {
    "prompt_ids": _IDS,
    "prompt_cut": Value("bool"),
    "response_cut": Value("bool"),
    "line": Value("int64"),
    "weight": Value("float64"),
}
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
        preprocess_workers: tokenise in up to so many processes; None: in one for each core of this process.
        progress: (items, total=..., title=...) -> the items, and shows meanwhile how many of them have passed.
    """

    kind: ExampleKind
    folder: Path
    fields: Fields
    encoder: RecordEncoder
    truncation: Truncation
    shared: bool = False
    preprocess_workers: int | None = 1
    progress: Progress = show_nothing

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
            try:
                if not self._write(path, cached, columns, broken):
                    return None, columns
            except FileNotFoundError:  # the parts: where there are no locks, another process may be done first
                if (found := self._read(cached)) is None:
                    raise
                return found
            about = {**asdict(columns), "sha256": file_hash(cached)}
            with publish_file(cached.with_suffix(".json"), private=not self.shared) as writing:
                writing.write_text(json.dumps(about), encoding="utf-8")
            shutil.rmtree(cached.with_suffix(PARTS), ignore_errors=True)
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
        before, expected = broken.total, number_of_parts(path)
        writer = PartWriter(
            kind=self.kind,
            path=path,
            folder=cached.with_suffix(PARTS),
            fields=self.fields,
            encoder=self.encoder,
            truncation=self.truncation,
            private=not self.shared,
        )
        make_folder(writer.folder, private=writer.private)
        processes = number_of_processes(self.preprocess_workers, expected)
        title, count, parts = f"tokenising {path.name}", 0, 0
        results = map_parts(
            writer, file_parts(path), processes=processes, doing=title, setting="model.data.preprocess_workers"
        )
        try:
            for result in self.progress(results, total=expected, title=title) if expected > 1 else results:
                result.add_to(path, columns, broken)
                count, parts = count + result.rows, parts + 1
            if count == 0 and broken.total == before:
                broken.add(path, 1, "the file must have at least one row, got none; leave it out of data_prefix")
            if self._name(path) != cached.name:
                raise DataError(f"{path} was changed while it was read; start again when it is complete")
        except DataError:
            shutil.rmtree(writer.folder, ignore_errors=True)
            raise
        if broken.total > before:
            shutil.rmtree(writer.folder, ignore_errors=True)
            return False
        writer.assemble(cached, parts=parts)
        logger.info("tokenised %d rows of %s", count, path)
        return True
