"""Rows tokenised once, kept in an Arrow file that every rank maps into memory instead of reading it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from datasets import Dataset, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter

from nemo_kto.data.chat import EncodedRow, RowEncoder
from nemo_kto.data.records import BrokenRows, KTORecord, read_kto_records
from nemo_kto.data.truncation import check_truncation, fit

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it when the same data and tokenizer give other ids or other columns
_BATCH = 1000
_FEATURES = Features(
    {
        "prompt_ids": Sequence(Value("int32")),
        "response_ids": Sequence(Value("int32")),
        "desirable": Value("bool"),
        "line": Value("int64"),
    }
)


class TokenCache:
    """Arrow files of tokenised rows, one for each jsonl file, in one folder.

    A file's name holds a hash of everything that decides its content: path, size and time of change of the data, the
    tokenizer, the length and the truncation. Files appear under their name complete or not at all, so any number of
    processes may read and even write at the same time.
    """

    def __init__(self, *, folder: str | Path, encoder: RowEncoder, seq_length: int, truncation_mode: str) -> None:
        """Args: folder: made if it does not exist; seq_length, truncation_mode: see ``truncation.fit``."""
        check_truncation(seq_length=seq_length, mode=truncation_mode)
        self._folder = Path(folder)
        self._encoder = encoder
        self._tokenizer_hash = encoder.fingerprint()
        self._seq_length = seq_length
        self._truncation_mode = truncation_mode

    def open(self, path: Path, *, broken: BrokenRows) -> Dataset | None:
        """The rows of a jsonl file (columns prompt_ids, response_ids, desirable, line), tokenised if they are not yet.

        Returns:
            The memory-mapped rows, or None where rows were broken (they are added to ``broken``).
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
        key += [self._tokenizer_hash, self._seq_length, self._truncation_mode]
        return f"kto-{path.stem}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.arrow"

    def _write(self, path: Path, cached: Path, broken: BrokenRows) -> bool:
        logger.info("tokenising %s into %s", path, cached)
        before, count = broken.total, 0
        handle, writing = tempfile.mkstemp(prefix=f".{cached.name}-", dir=self._folder)
        os.close(handle)
        try:
            with ArrowWriter(path=writing, features=_FEATURES, writer_batch_size=_BATCH) as writer:
                for columns in self._columns(path, broken):
                    writer.write_batch(columns)
                    count += len(columns["line"])
                writer.finalize()
            if broken.total > before:
                return False
            if count == 0:
                broken.add(path, 1, "the file must have at least one row, got none; leave it out of data_prefix")
                return False
            os.chmod(writing, 0o644)  # mkstemp shows its files to nobody else; the cache is to be shared
            os.replace(writing, cached)
        finally:
            Path(writing).unlink(missing_ok=True)
        logger.info("tokenised %d rows of %s", count, path)
        return True

    def _columns(self, path: Path, broken: BrokenRows) -> Iterator[dict[str, list]]:
        for records in _batches(read_kto_records(path, broken=broken)):
            columns: dict[str, list] = {name: [] for name in _FEATURES}
            for record, row in zip(records, self._encoder.encode(records), strict=True):
                if not isinstance(row, EncodedRow):
                    broken.add(path, record.line, str(row))
                    continue
                prompt, response = fit(
                    row.prompt_ids,
                    row.response_ids,
                    seq_length=self._seq_length,
                    mode=self._truncation_mode,
                    bos_id=self._encoder.bos_id,
                )
                for name, value in zip(_FEATURES, (prompt, response, record.desirable, record.line), strict=True):
                    columns[name].append(value)
            if columns["line"]:
                yield columns


def _batches(records: Iterable[KTORecord]) -> Iterator[list[KTORecord]]:
    iterator = iter(records)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
