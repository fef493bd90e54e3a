"""Examples: rows tokenised once, kept in an Arrow file that every rank maps into memory instead of reading it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.chat import EncodedExample, RecordEncoder
from nemo_kto.data.records import DPORecord, KTORecord, RowError, RowErrors, read_dpo_records, read_kto_records
from nemo_kto.data.truncation import Truncation
from nemo_kto.files import publish_file

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it when the same data and tokenizer give other ids or other columns
_BATCH = 1000
_IDS = Sequence(Value("int32"))
Columns = dict[str, object]  # of one example


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
    read: Callable[[Path, RowErrors], Iterator[Any]]
    tokenise: Callable[[list[Any], RecordEncoder, Truncation], Iterator[Columns | RowError]]


def _tokenise_kto(records: list[KTORecord], encoder: RecordEncoder, cut: Truncation) -> Iterator[Columns | RowError]:
    for record, example in zip(records, encoder.encode(records), strict=True):
        if isinstance(example, EncodedExample):
            prompt, response = cut.truncate(example.prompt_ids, example.response_ids)
            yield {"prompt_ids": prompt, "response_ids": response, "desirable": record.desirable, "line": record.line}
        else:
            yield example


def _tokenise_dpo(records: list[DPORecord], encoder: RecordEncoder, cut: Truncation) -> Iterator[Columns | RowError]:
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
        prompt, good, bad = cut.truncate_pair(chosen.prompt_ids, chosen.response_ids, rejected.response_ids)
        columns = {"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad, "line": record.line}
        yield columns | {"chosen_reward": record.chosen_reward, "rejected_reward": record.rejected_reward}


KTO_EXAMPLES = ExampleKind(
    name="kto",
    features=Features({"prompt_ids": _IDS, "response_ids": _IDS, "desirable": Value("bool"), "line": Value("int64")}),
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


@dataclass(kw_only=True, eq=False)
class TokenCache:
    """Arrow files of examples, one for each jsonl file, in one folder.

    A file's name holds a hash of everything that decides its content: path, size and time of change of the data, the
    tokenizer, the length and the truncation. Files appear under their name complete or not at all, so any number of
    processes may read and even write at the same time.

    Attributes:
        kind, encoder, truncation: what becomes of a row.
        folder: made if absent.
    """

    kind: ExampleKind
    folder: Path
    encoder: RecordEncoder
    truncation: Truncation

    def __post_init__(self) -> None:
        self._tokenizer_hash = self.encoder.fingerprint()

    def open(self, path: Path, *, broken: RowErrors) -> Dataset | None:
        """The examples of a jsonl file, in the columns of their kind, tokenised if they are not yet.

        Returns:
            The memory-mapped examples, or None where rows were broken (they are added to ``broken``).
        """
        cached = self.folder / self._name(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        return Dataset.from_file(str(cached)) if cached.exists() or self._write(path, cached, broken) else None

    def _name(self, path: Path) -> str:
        state = path.stat()
        key = [_FORMAT, str(path.resolve()), state.st_size, state.st_mtime_ns]
        key += [self._tokenizer_hash, self.truncation.seq_length, self.truncation.mode]
        return f"{self.kind.name}-{path.stem}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.arrow"

    def _write(self, path: Path, cached: Path, broken: RowErrors) -> bool:
        logger.info("tokenising %s into %s", path, cached)
        before = broken.total
        with publish_file(cached) as writing:
            with ArrowWriter(path=str(writing), features=self.kind.features, writer_batch_size=_BATCH) as writer:
                for example in self._examples(path, broken):
                    writer.write(example)
                count, _ = writer.finalize()
            if count == 0 and broken.total == before:
                broken.add(path, 1, "the file must have at least one row, got none; leave it out of data_prefix")
            if broken.total > before:
                writing.unlink()
                return False
        logger.info("tokenised %d rows of %s", count, path)
        return True

    def _examples(self, path: Path, broken: RowErrors) -> Iterator[Columns]:
        records = self.kind.read(path, broken)
        while batch := list(islice(records, _BATCH)):
            examples = self.kind.tokenise(batch, self.encoder, self.truncation)
            for record, example in zip(batch, examples, strict=True):
                if isinstance(example, RowError):
                    broken.add(path, record.line, str(example))
                else:
                    yield example
