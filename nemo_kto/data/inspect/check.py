"""Statistics of data files: balance, lengths, repetitions, contradictions and broken rows; no model is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_kto.data.inspect.balance import MAX_BALANCE, MIN_BALANCE, balance_warning, loss_balance
from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, PartErrors
from nemo_kto.data.rows.records import DPORecord, KTORecord, LastRowError, RowError, TextOrMessages
from nemo_kto.data.tokens.parts import FilePart
from nemo_kto.data.tokens.truncation import Truncation

if TYPE_CHECKING:
    from nemo_kto.data.tokens.chat import EncodedExample, RecordEncoder

_BATCH = 1000
_QUANTILES = (("least", 0), ("half", 50), ("90 %", 90), ("99 %", 99), ("most", 100))
_PROMPT, _SEQUENCE = "prompt", "prompt and answer"


@dataclass(kw_only=True)
class Counted:
    """Statistics of a part of a file with N examples, or pairs.

    Attributes:
        columns: columns of the rows.
        broken: line and error of each broken row.
        is_last: no further part should be read, see ``records.LastRowError``.
        lines: [N] int64, line of each example.
        prompts: [N] uint64, hash of each prompt.
        examples: [N] uint64, hash of prompt, answers and label.
        opposites: [N] uint64, hash of the example that would contradict this one.
        desirable: [N] bool; True for pairs.
        weights: [N] float64.
        characters, tokens: name of a text (such as "prompt") -> its lengths; tokens are counted only with a tokenizer.
        cut_prompts, cut_answers: number of examples whose prompt, or any of whose answers, would be truncated.
    """

    columns: FileColumns
    broken: list[tuple[int, str]]
    is_last: bool
    lines: np.ndarray
    prompts: np.ndarray
    examples: np.ndarray
    opposites: np.ndarray
    desirable: np.ndarray
    weights: np.ndarray
    characters: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]
    cut_prompts: int
    cut_answers: int


@dataclass(frozen=True, kw_only=True)
class PartCheck:
    """Computation of the statistics of parts of a file, usable in any process.

    Attributes:
        path: the data file.
        as_pairs: rows are pairs for DPO; otherwise labelled answers for KTO.
        fields: the columns to rename.
        encoder: tokenises the records; None: only characters are counted.
        truncation: truncation to count; None: nothing is truncated.
    """

    path: Path
    as_pairs: bool
    fields: Fields
    encoder: RecordEncoder | None = None
    truncation: Truncation | None = None

    def __call__(self, part: FilePart) -> Counted:
        """Return the statistics of a part."""
        columns, broken, counter = FileColumns(), PartErrors(), _Counter(self.truncation)
        reader = FileReader(fields=self.fields, broken=broken)
        read = reader.dpo_records if self.as_pairs else reader.kto_records
        records: Iterator[KTORecord | DPORecord] = iter(read(self.path, columns, part))
        is_last = False
        while not is_last and (batch := list(islice(records, _BATCH))):
            sides = [list(record.sides) if isinstance(record, DPORecord) else [record] for record in batch]
            encoded = iter([] if self.encoder is None else self.encoder.encode([side for each in sides for side in each]))
            for each in sides:
                results = list(islice(encoded, len(each)))
                if errors := [result for result in results if isinstance(result, RowError)]:
                    broken.add(self.path, each[0].line, str(errors[0]))
                    if isinstance(errors[0], LastRowError):
                        is_last = True
                        break
                else:
                    counter.add(each, [result for result in results if not isinstance(result, RowError)])
        return counter.counted(columns, broken.rows, is_last=is_last)


class _Counter:
    def __init__(self, truncation: Truncation | None) -> None:
        self._truncation = truncation
        self._lines: list[int] = []
        self._hashes: tuple[list[int], list[int], list[int]] = ([], [], [])  # prompt, example, opposite
        self._desirable: list[bool] = []
        self._weights: list[float] = []
        self._characters: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._cut_prompts = self._cut_answers = 0

    def add(self, sides: Sequence[KTORecord], encoded: Sequence[EncodedExample]) -> None:
        """Count an example, given as one side, or a pair, given as two sides."""
        first, pair = sides[0], len(sides) == 2
        self._lines.append(first.line)
        self._desirable.append(first.desirable)
        self._weights.append(first.weight)
        prompt = _digest(_text(first.prompt), json.dumps(first.template, sort_keys=True) if first.template else "")
        answers = [_digest(_text(side.response)) for side in sides]
        labels = ["", ""] if pair else [str(first.desirable), str(not first.desirable)]
        for hashes, digest in zip(
            self._hashes,
            (prompt, _digest(prompt, *answers, labels[0]), _digest(prompt, *answers[::-1], labels[1])),
            strict=True,
        ):
            hashes.append(int(digest, 16))
        names = [_name(side, pair=pair) for side in sides]
        _note(self._characters, _PROMPT, _characters(first.prompt))
        for name, side in zip(names, sides, strict=True):
            _note(self._characters, name, _characters(side.response))
        if encoded:
            self._add_tokens(names, encoded)

    def _add_tokens(self, names: Sequence[str], encoded: Sequence[EncodedExample]) -> None:
        prompt, answers = encoded[0].prompt_ids, [side.response_ids for side in encoded]
        _note(self._tokens, _PROMPT, len(prompt))
        for name, answer in zip(names, answers, strict=True):
            _note(self._tokens, name, len(answer))
        _note(self._tokens, _SEQUENCE, len(prompt) + max(map(len, answers)))
        if self._truncation is not None:
            kept, *kept_answers = self._truncation.truncate_pair(prompt, answers[0], answers[-1])
            self._cut_prompts += len(kept) < len(prompt)
            self._cut_answers += len(kept_answers[0]) < len(answers[0]) or len(kept_answers[1]) < len(answers[-1])

    def counted(self, columns: FileColumns, broken: list[tuple[int, str]], *, is_last: bool) -> Counted:
        prompts, examples, opposites = (np.array(hashes, dtype=np.uint64) for hashes in self._hashes)
        return Counted(
            columns=columns,
            broken=broken,
            is_last=is_last,
            lines=np.array(self._lines, dtype=np.int64),
            prompts=prompts,
            examples=examples,
            opposites=opposites,
            desirable=np.array(self._desirable, dtype=bool),
            weights=np.array(self._weights),
            characters={name: np.array(lengths, dtype=np.int32) for name, lengths in self._characters.items()},
            tokens={name: np.array(lengths, dtype=np.int32) for name, lengths in self._tokens.items()},
            cut_prompts=self._cut_prompts,
            cut_answers=self._cut_answers,
        )


def _note(lengths: dict[str, list[int]], name: str, length: int) -> None:
    lengths.setdefault(name, []).append(length)


def _name(side: KTORecord, *, pair: bool) -> str:
    kinds = ("rejected", "chosen") if pair else ("undesirable", "desirable")
    return f"{kinds[side.desirable]} answer"


def _text(value: TextOrMessages) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _characters(value: TextOrMessages) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(len(str(message.get("content") or "")) for message in value)


def _digest(*texts: str) -> str:
    """Return a 64-bit hash of texts; the probability of any collision among a million examples is 1 in 30 million."""
    whole = blake2b(digest_size=8)
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.hexdigest()


@dataclass(kw_only=True)
class Report:
    """Report on all files of a data set.

    Attributes:
        as_pairs: see :class:`PartCheck`.
        seq_length: length to which examples are truncated; None: they are not truncated.
        columns: columns of the rows of each file.
    """

    as_pairs: bool
    seq_length: int | None = None
    columns: dict[Path, FileColumns] = field(default_factory=dict, init=False)
    _parts: list[Counted] = field(default_factory=list, init=False)
    _files: list[int] = field(default_factory=list, init=False)  # index of the file of each part
    _cut: list[int] = field(default_factory=lambda: [0, 0], init=False)

    def add(self, path: Path, counted: Counted) -> None:
        """Add the statistics of a part of a file."""
        self.columns.setdefault(path, FileColumns()).merge(counted.columns)
        self._parts.append(counted)
        self._files.append(list(self.columns).index(path))
        self._cut = [self._cut[0] + counted.cut_prompts, self._cut[1] + counted.cut_answers]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        for path, columns in self.columns.items():
            yield f"{path}: {_count(columns.rows, 'row')}"
            if columns.unused:
                yield f"  columns that are not used: {columns.unused_text()}"
        total = sum(len(part.lines) for part in self._parts)
        if total:
            yield ""
            yield from self._kinds(total)
            yield from self._repetitions(total)
            yield from self._lengths("characters", [part.characters for part in self._parts])
            yield from self._lengths("tokens", [part.tokens for part in self._parts])
        if total and self.seq_length is not None:
            told = f"at model.data.seq_length={self.seq_length}, of {total:,}"
            yield f"truncated       {_count(self._cut[0], 'prompt')} and {_count(self._cut[1], 'answer')} {told}"

    def _kinds(self, total: int) -> Iterator[str]:
        if self.as_pairs:
            yield f"pairs           {total:,}"
            return
        good = int(sum(part.desirable.sum() for part in self._parts))
        yield f"examples        {total:,}: {good:,} desirable, {total - good:,} undesirable"
        good_weight, bad_weight = (
            sum(part.weights[part.desirable == kind].sum() for part in self._parts) for kind in (True, False)
        )
        balance = loss_balance(good_weight, bad_weight, 1.0, 1.0)
        if balance is None:
            yield f"balance         all examples are {'desirable' if good else 'undesirable'}"
        elif (warning := balance_warning(good_weight, bad_weight, 1.0, 1.0)) is not None:
            yield f"balance         {warning}"
        else:
            fits = f"from {MIN_BALANCE:g} to {MAX_BALANCE:.4g}, as it should be"
            yield f"balance         desirable / undesirable = {balance:.4g}, {fits}: weights of 1 are fine"

    def _repetitions(self, total: int) -> Iterator[str]:
        unit = "pair" if self.as_pairs else "example"
        prompts, examples, opposites = (
            np.concatenate([getattr(part, name) for part in self._parts]) for name in ("prompts", "examples", "opposites")
        )
        _, first, counts = np.unique(prompts, return_index=True, return_counts=True)
        yield f"prompts         {len(counts):,} different" + self._groups(counts, first, unit)
        known, first, which = np.unique(examples, return_index=True, return_inverse=True)
        repeated = np.flatnonzero(first[which] != np.arange(total))
        told = ""
        if len(repeated):
            told = f", the first at {self._place(repeated[0])}, which repeats {self._place(first[which[repeated[0]]])}"
        yield f"duplicates      {_count(len(repeated), unit)} with prompt, answer and label of an earlier one{told}"
        at = np.searchsorted(known, opposites).clip(max=len(known) - 1)
        against = np.flatnonzero(known[at] == opposites)
        told = ""
        if len(against):
            told = f", the first at {self._place(against[0])}, against {self._place(first[at[against[0]]])}"
        what = "whose answers stand the other way round" if self.as_pairs else "whose answer has the other label too"
        yield f"contradictions  {_count(len(against), unit)} {what}{told}"

    def _groups(self, counts: np.ndarray, first: np.ndarray, unit: str) -> str:
        if not (groups := int((counts > 1).sum())):
            return f", each of one {unit}"
        largest = int(counts.argmax())
        return f", {groups:,} of several {unit}s, at most {counts[largest]:,} (that at {self._place(first[largest])})"

    def _place(self, example: np.integer) -> str:
        """Return file and line of the example with the given index, such as "rows.jsonl:3"."""
        number = int(example)
        for part, file in zip(self._parts, self._files, strict=True):
            if number < len(part.lines):
                return f"{list(self.columns)[file]}:{part.lines[number]}"
            number -= len(part.lines)
        raise IndexError(f"there is no example {example}")

    def _lengths(self, unit: str, parts: Sequence[dict[str, np.ndarray]]) -> Iterator[str]:
        names = sorted(
            {name for part in parts for name in part}, key=lambda name: (name != _PROMPT, name == _SEQUENCE, name)
        )
        if names:
            yield f"{unit:24}" + "".join(f"{title:>9}" for title, _ in _QUANTILES)
        for name in names:
            lengths = np.concatenate([part[name] for part in parts if name in part])
            values = np.percentile(lengths, [quantile for _, quantile in _QUANTILES], method="inverted_cdf")
            yield f"  {name:22}" + "".join(f"{int(value):9,}" for value in values)


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'s' * (number != 1)}"
