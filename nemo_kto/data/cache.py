"""Examples: rows tokenised once, kept in an Arrow file that every rank maps into memory instead of reading it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.chat import EncodedExample, RecordEncoder
from nemo_kto.data.records import DPORecord, KTORecord, Record, RowError, RowErrors, read_dpo_records, read_kto_records
from nemo_kto.data.truncation import check_truncation, truncate, truncate_pair
from nemo_kto.files import publish_file

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it when the same data and tokenizer give other ids or other columns
_BATCH = 1000
_IDS = Sequence(Value("int32"))
Columns = dict[str, object]  # of one example


class Cut(NamedTuple):
    """How examples are cut, see ``truncation.truncate``."""

    seq_length: int
    mode: str
    bos_id: int | None


@dataclass(frozen=True, kw_only=True)
class ExampleKind:
    """What the rows of a file become.

    Attributes:
        name: begins the names of the cached files.
        features: columns of the cached examples; ``line`` is where an example came from.
        read: the records of a file.
        tokenise: records -> for each its columns, or why it cannot be used.
    """

    name: str
    features: Features
    read: Callable[..., Iterator[Any]]
    tokenise: Callable[[list[Any], RecordEncoder, Cut], Iterator[Columns | RowError]]


def _tokenise_kto(records: list[KTORecord], encoder: RecordEncoder, cut: Cut) -> Iterator[Columns | RowError]:
    for record, example in zip(records, encoder.encode(records), strict=True):
        if not isinstance(example, EncodedExample):
            yield example
            continue
        prompt, response = truncate(example.prompt_ids, example.response_ids, **cut._asdict())
        yield {"prompt_ids": prompt, "response_ids": response, "desirable": record.desirable, "line": record.line}


def _tokenise_dpo(records: list[DPORecord], encoder: RecordEncoder, cut: Cut) -> Iterator[Columns | RowError]:
    sides = [
        KTORecord(prompt=record.prompt, response=answer, desirable=good, line=record.line)
        for record in records
        for good, answer in ((True, record.chosen), (False, record.rejected))
    ]
    encoded = iter(encoder.encode(sides))
    for record, chosen, rejected in zip(records, encoded, encoded, strict=True):
        if not (isinstance(chosen, EncodedExample) and isinstance(rejected, EncodedExample)):
            yield chosen if isinstance(chosen, RowError) else rejected  # type: ignore[misc]  # one of them is an error
            continue
        prompt, answers = truncate_pair(chosen.prompt_ids, (chosen.response_ids, rejected.response_ids), **cut._asdict())
        yield {
            "prompt_ids": prompt,
            "chosen_ids": answers[0],
            "rejected_ids": answers[1],
            "chosen_reward": record.chosen_reward,
            "rejected_reward": record.rejected_reward,
            "line": record.line,
        }


KTO_EXAMPLES = ExampleKind(
    name="kto",
    features=Features(
        {"prompt_ids": _IDS, "response_ids": _IDS, "desirable": Value("bool"), "line": Value("int64")},
    ),
    read=read_kto_records,
    tokenise=_tokenise_kto,
)
DPO_EXAMPLES = ExampleKind(
    name="dpo",
    features=Features(
        {
            "prompt_ids": _IDS,
            "chosen_ids": _IDS,
            "rejected_ids": _IDS,
            "chosen_reward": Value("float64"),
            "rejected_reward": Value("float64"),
            "line": Value("int64"),
        }
    ),
    read=read_dpo_records,
    tokenise=_tokenise_dpo,
)


class TokenCache:
    """Arrow files of examples, one for each jsonl file, in one folder.

    A file's name holds a hash of everything that decides its content: path, size and time of change of the data, the
    tokenizer, the length and the truncation. Files appear under their name complete or not at all, so any number of
    processes may read and even write at the same time.
    """

    def __init__(
        self, *, kind: ExampleKind, folder: str | Path, encoder: RecordEncoder, seq_length: int, truncation_mode: str
    ) -> None:
        """Args: kind: of example; folder: made if absent; seq_length, truncation_mode: see ``truncation.truncate``."""
        check_truncation(seq_length=seq_length, mode=truncation_mode)
        self._kind = kind
        self._folder = Path(folder)
        self._encoder = encoder
        self._tokenizer_hash = encoder.fingerprint()
        self._cut = Cut(seq_length, truncation_mode, encoder.bos_id)

    def open(self, path: Path, *, broken: RowErrors) -> Dataset | None:
        """The examples of a jsonl file, in the columns of their kind, tokenised if they are not yet.

        Returns:
            The memory-mapped examples, or None where rows were broken (they are added to ``broken``).
        """
        cached = self._folder / self._name(path)
        if not cached.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._write(path, cached, broken):
                return None
        return Dataset.from_file(str(cached))

    def _name(self, path: Path) -> str:
        state = path.stat()
        key = [_FORMAT, str(path.resolve()), state.st_size, state.st_mtime_ns]
        key += [self._tokenizer_hash, self._cut.seq_length, self._cut.mode]
        return f"{self._kind.name}-{path.stem}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.arrow"

    def _write(self, path: Path, cached: Path, broken: RowErrors) -> bool:
        logger.info("tokenising %s into %s", path, cached)
        before, count = broken.total, 0
        with publish_file(cached) as writing:
            with ArrowWriter(path=str(writing), features=self._kind.features, writer_batch_size=_BATCH) as writer:
                for columns in self._columns(path, broken):
                    writer.write_batch(columns)
                    count += len(columns["line"])
                writer.finalize()
            if count == 0 and broken.total == before:
                broken.add(path, 1, "the file must have at least one row, got none; leave it out of data_prefix")
            if broken.total > before:
                writing.unlink()
                return False
        logger.info("tokenised %d rows of %s", count, path)
        return True

    def _columns(self, path: Path, broken: RowErrors) -> Iterator[dict[str, list]]:
        for records in _batches(self._kind.read(path, broken=broken)):
            columns: dict[str, list] = {name: [] for name in self._kind.features}
            examples = self._kind.tokenise(records, self._encoder, self._cut)
            for record, example in zip(records, examples, strict=True):
                if isinstance(example, RowError):
                    broken.add(path, record.line, str(example))
                    continue
                for name, value in example.items():
                    columns[name].append(value)
            if columns["line"]:
                yield columns


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    iterator = iter(records)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
