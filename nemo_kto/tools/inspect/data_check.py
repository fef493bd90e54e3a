"""Statistics of data files: balance, lengths, repetitions, contradictions and broken rows; no model is needed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_kto.data.rows.forms import row_place
from nemo_kto.data.rows.labels import Labels, balance_text, balance_warning
from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, PartErrors
from nemo_kto.data.rows.records import COMMON_LABELS, DataError, DPORecord, KTORecord, LastRowError, RowError, TextOrMessages
from nemo_kto.data.rows.row_files import FilePart
from nemo_kto.data.tokens.truncation import Truncation

if TYPE_CHECKING:
    from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder

_BATCH = 1000
_QUANTILES = (("min", 0), ("median", 50), ("90 %", 90), ("99 %", 99), ("max", 100))
_PROMPT, _SEQUENCE = "prompt", "prompt and answer"
Lengths = dict[str, "array[int]"]  # name of a text (such as "prompt") -> its length in each example


@dataclass(kw_only=True)
class Counted:
    """Statistics of a part of a file with N examples, or pairs."""

    columns: FileColumns = field(default_factory=FileColumns)
    broken: list[tuple[int, str]] = field(default_factory=list)  # line and error of each broken row
    is_last: bool = False  # no further part should be read, see ``records.LastRowError``
    lines: array[int] = field(default_factory=lambda: array("q"))  # [N], line of each example
    prompts: array[int] = field(default_factory=lambda: array("Q"))  # [N], hash of each prompt
    examples: array[int] = field(default_factory=lambda: array("Q"))  # [N], hash of prompt, answers and label
    opposites: array[int] = field(default_factory=lambda: array("Q"))  # [N], hash of the contradicting example
    desirable: array[int] = field(default_factory=lambda: array("b"))  # [N], 1 or 0; 1 for pairs
    weights: array[float] = field(default_factory=lambda: array("d"))  # [N]
    characters: Lengths = field(default_factory=dict)
    tokens: Lengths = field(default_factory=dict)  # counted only with a tokenizer
    untemplated: int = 0  # examples or pairs of plain text that lack the tokenizer's chat template
    cut_prompts: int = 0  # examples whose prompt would be truncated
    cut_answers: int = 0  # examples any of whose answers would be truncated

    def add(self, sides: Sequence[KTORecord], encoded: Sequence[EncodedExample], truncation: Truncation | None) -> None:
        """Count an example, given as one side, or a pair, given as two sides; ``encoded`` is empty without a tokenizer."""
        first, is_pair = sides[0], len(sides) == 2
        self.lines.append(first.line)
        self.desirable.append(first.desirable)
        self.weights.append(first.weight)
        prompt = _digest(
            _text(first.prompt), json.dumps(first.template, sort_keys=True, default=str) if first.template else ""
        )
        answers = [_digest(_text(side.response)) for side in sides]
        label, other = ("", "") if is_pair else (str(first.desirable), str(not first.desirable))
        self.prompts.append(int(prompt, 16))
        self.examples.append(int(_digest(prompt, *answers, label), 16))
        self.opposites.append(int(_digest(prompt, *answers[::-1], other), 16))
        kinds = ("rejected", "chosen") if is_pair else ("undesirable", "desirable")
        names = [f"{kinds[side.desirable]} answer" for side in sides]
        characters = [_characters(first.prompt), *(_characters(side.response) for side in sides)]
        _append(self.characters, dict(zip((_PROMPT, *names), characters, strict=True)))
        if not encoded:
            return
        prompt_ids, responses = encoded[0].prompt_ids, [side.response_ids for side in encoded]
        tokens = dict(zip(names, map(len, responses), strict=True))
        _append(self.tokens, {_PROMPT: len(prompt_ids), **tokens, _SEQUENCE: len(prompt_ids) + max(tokens.values())})
        if truncation is not None:
            kept, *kept_answers = truncation.truncate_pair(prompt_ids, responses[0], responses[-1])
            self.cut_prompts += len(kept) < len(prompt_ids)
            self.cut_answers += len(kept_answers[0]) < len(responses[0]) or len(kept_answers[1]) < len(responses[-1])


def _append(lengths: Lengths, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        lengths.setdefault(name, array("i")).append(value)


def _text(value: TextOrMessages) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


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


@dataclass(frozen=True, kw_only=True)
class PartCheck:
    """Computation of the statistics of parts of a file, usable in any process."""

    path: Path
    as_pairs: bool  # rows are pairs for DPO; otherwise labelled answers for KTO
    fields: Fields
    encoder: RecordEncoder | None = None  # None: only characters are counted
    truncation: Truncation | None = None  # to be counted; None: nothing is truncated

    def __call__(self, part: FilePart) -> Counted:
        counted, broken = Counted(), PartErrors()
        reader = FileReader(fields=self.fields, broken=broken)
        read = reader.dpo_records if self.as_pairs else reader.kto_records
        records: Iterator[KTORecord | DPORecord] = iter(read(self.path, counted.columns, part))
        while not counted.is_last and (batch := self._next(records, counted, broken)):
            sides = [list(record.sides) if isinstance(record, DPORecord) else [record] for record in batch]
            encoded = iter([] if self.encoder is None else self.encoder.encode([side for each in sides for side in each]))
            for each in sides:
                results = list(islice(encoded, len(each)))
                usable = [result for result in results if not isinstance(result, RowError)]
                errors = [result for result in results if isinstance(result, RowError)]
                if errors and not counted.columns.leaves_out(errors[0], self.fields.drop):
                    broken.add(self.path, each[0].line, str(errors[0]))
                    if isinstance(errors[0], LastRowError):
                        counted.is_last = True
                        break
                elif not errors and counted.columns.keeps(usable, self.fields.drop):
                    counted.add(each, usable, self.truncation)
                    if self.encoder is not None and isinstance(each[0].prompt, str):
                        counted.untemplated += self.encoder.is_untemplated(usable[0].prompt_ids)
        counted.broken = broken.rows
        return counted

    def _next(
        self, records: Iterator[KTORecord | DPORecord], counted: Counted, broken: PartErrors
    ) -> list[KTORecord | DPORecord]:
        batch = list[KTORecord | DPORecord]()
        try:
            batch.extend(islice(records, _BATCH))
        except DataError:  # of a broken row that ends reading, or of a file that cannot be read further
            if not broken.total:
                raise
            counted.is_last = True
        return batch


@dataclass(kw_only=True)
class Report:
    """Report on all files of a data set."""

    as_pairs: bool
    seq_length: int | None = None  # to which examples are truncated; None: they are not truncated
    labels: Labels = COMMON_LABELS
    columns: dict[Path, FileColumns] = field(default_factory=dict, init=False)  # of the rows of each file
    _parts: list[Counted] = field(default_factory=list, init=False)
    _files: list[Path] = field(default_factory=list, init=False)  # file of each part

    def add(self, path: Path, counted: Counted) -> None:
        """Add the statistics of a part of a file."""
        self.columns.setdefault(path, FileColumns()).merge(counted.columns)
        self._parts.append(counted)
        self._files.append(path)

    def examples_of(self, path: Path) -> int:
        """Return the number of examples, or pairs, that a file has."""
        return sum(len(part.lines) for part, file in zip(self._parts, self._files, strict=True) if file == path)

    def lines(self) -> Iterator[str]:
        for path, columns in self.columns.items():
            yield f"{path}: {_count(columns.rows, 'row')}"
            yield from (f"  {note}" for note in columns.notes())
            if labels := self.labels.text(columns.labels):
                yield f"  labels: {labels}"
        total = sum(len(part.lines) for part in self._parts)
        if not total:
            return
        yield ""
        if self.as_pairs:
            yield f"pairs           {total:,}"
        else:
            yield from self._classes(total)
        yield from self._repetitions(total)
        yield from self._lengths("characters", [part.characters for part in self._parts])
        yield from self._lengths("tokens", [part.tokens for part in self._parts])
        if untemplated := sum(part.untemplated for part in self._parts):
            which = f"{untemplated:,} of {total:,} are plain text without the model's chat template"
            yield f"template        {which}; model.data.apply_chat_template=true applies it"
        if self.seq_length is not None:
            prompts, answers = sum(part.cut_prompts for part in self._parts), sum(part.cut_answers for part in self._parts)
            cut = f"{_count(prompts, 'prompt')} and {_count(answers, 'answer')} of {total:,}"
            yield f"truncated       {cut} at model.data.seq_length={self.seq_length}"

    def _classes(self, total: int) -> Iterator[str]:
        desirable, weights = self._joined("desirable") == 1, self._joined("weights")
        good = int(desirable.sum())
        yield f"examples        {total:,}: {good:,} desirable, {total - good:,} undesirable"
        good_weight, bad_weight = weights[desirable].sum(), weights[~desirable].sum()
        balance = good_weight, bad_weight, 1.0, 1.0
        yield f"balance         {balance_warning(*balance) or balance_text(*balance)}"

    def _repetitions(self, total: int) -> Iterator[str]:
        unit = "pair" if self.as_pairs else "example"
        _, first, counts = np.unique(self._joined("prompts"), return_index=True, return_counts=True)
        groups, largest = int((counts > 1).sum()), int(counts.argmax())
        several = f"{groups:,} with several {unit}s, at most {counts[largest]:,} ({self._place(first[largest])})"
        yield f"prompts         {len(counts):,} distinct, {several if groups else f'one {unit} each'}"
        known, first, which = np.unique(self._joined("examples"), return_index=True, return_inverse=True)
        repeated = np.flatnonzero(first[which] != np.arange(total))
        place = ""
        if len(repeated):
            place = f", first {self._place(repeated[0])}, equal to {self._place(first[which[repeated[0]]])}"
        yield f"duplicates      {_count(len(repeated), unit)} with prompt, answer and label of an earlier one{place}"
        opposites = self._joined("opposites")
        at = np.searchsorted(known, opposites).clip(max=len(known) - 1)
        against = np.flatnonzero(known[at] == opposites)
        place = ""
        if len(against):
            place = f", first {self._place(against[0])}, against {self._place(first[at[against[0]]])}"
        what = "with the answers of another pair swapped" if self.as_pairs else "whose answer also has the other label"
        yield f"contradictions  {_count(len(against), unit)} {what}{place}"

    def _joined(self, name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in self._parts])

    def _place(self, example: np.integer) -> str:
        """Return file and line of the example with the given index, such as "rows.jsonl:3"."""
        number = int(example)
        for part, file in zip(self._parts, self._files, strict=True):
            if number < len(part.lines):
                return row_place(file, part.lines[number])
            number -= len(part.lines)
        raise IndexError(f"there is no example {example}")

    def _lengths(self, unit: str, parts: Sequence[Lengths]) -> Iterator[str]:
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
