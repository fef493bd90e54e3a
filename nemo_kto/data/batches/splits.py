"""Splits of a run: ranges of rows, blends of several sources by weight, and rows that are left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Generic, TypeVar

import datasets
import numpy as np
from datasets.table import Table, concat_tables
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.batches.dataset import DPODataset, FileOfTable, KTODataset
from nemo_kto.data.rows.data_sources import (
    AUTO,
    SPLITS,
    WHOLE,
    Source,
    read_data_prefix,
    read_splits_string,
    split_shares,
    validation_names,
    validation_split,
)
from nemo_kto.data.rows.forms import data_name
from nemo_kto.data.rows.labels import Labels
from nemo_kto.data.rows.reader import Fields, FileColumns, RowErrors
from nemo_kto.data.rows.records import CONTRADICTIONS, DEFAULT_DROPS, DUPLICATES, DataError, drop_text
from nemo_kto.data.tokens.cache import ExampleKind, Progress, TokenCache, show_nothing
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.errors import UserError
from nemo_kto.utils.intervals import MIN_VALIDATION_ROWS

Range = tuple[Source, int, int]  # rows [start, stop) of a source

logger = logging.getLogger(__name__)

_MAX_REPEATS = 100
_NAMED_FILES = 3  # maximum number of files with a warning each

AnyDataset = TypeVar("AnyDataset", KTODataset, DPODataset)


@dataclass(frozen=True, kw_only=True)
class Splits(Generic[AnyDataset]):
    """Datasets of a run; None for a split without data."""

    train: AnyDataset | None
    validation: Mapping[str, AnyDataset]  # by name; a single set without a name has the empty name
    test: AnyDataset | None
    labels: str = ""  # which values of the label columns mean desirable and undesirable; empty for pairs
    prompts: str = ""  # whether prompts of plain text use the chat template; empty if there are none, or no template
    left_out: str = ""  # numbers of rows that were left out, by kind; empty if there are none
    special_tokens: str = ""  # number of rows with special tokens within their texts; empty if there are none
    warnings: tuple[str, ...] = ()  # unexpected treatment of columns and rows, one line each

    @property
    def in_use(self) -> dict[str, AnyDataset]:
        """Name of each split that a run reads -> its dataset."""
        validation = {validation_split(name): examples for name, examples in self.validation.items()}
        return validation if self.train is None else {"train": self.train, **validation}


def build_splits(
    *,
    kind: ExampleKind,
    make: Callable[..., AnyDataset],
    data_prefix: object,
    splits_string: str | None,
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    truncation_mode: str,
    cache_dir: str | Path,
    seed: int,
    vocab_size: int | None = None,
    fields: Mapping[str, str] | None = None,
    labels: Mapping[str, Sequence[object]] | None = None,
    json_columns: Sequence[str] | None = None,
    drop: Sequence[str] = DEFAULT_DROPS,
    min_validation_rows: int = 1,
    cache_shared: bool = False,
    cache_verified: bool = False,
    preprocess_workers: int | None = 1,
    apply_chat_template: bool = False,
    date: datetime | None = None,
    max_rows: int | None = None,
    progress: Progress = show_nothing,
) -> Splits[AnyDataset]:
    """Build the training, validation and test datasets; they are tokenised once and then memory-mapped from ``cache_dir``.

    Args:
        kind: ``KTO_EXAMPLES`` or ``DPO_EXAMPLES``.
        make: (table=..., index=..., files=...) -> the dataset of a split: :class:`KTODataset`, or :class:`DPODataset` with
            its default rewards bound.
        data_prefix: see ``data_sources.read_data_prefix``.
        splits_string: shares of each file (or folder) in the order of its rows, such as "98,2", or "auto", see
            ``data_sources.split_shares``. None: all rows are for training. It is ignored if ``data_prefix`` itself
            defines the splits.
        tokenizer, vocab_size, apply_chat_template, date: see ``chat_template.RecordEncoder``.
        seq_length, truncation_mode: see ``truncation.Truncation``.
        fields, labels, json_columns: see ``reader.Fields`` and ``labels.Labels``.
        drop: kinds of rows that are left out, see ``records.DROPS``.
        seed: determines the order of the examples within a blend.
        cache_dir, cache_shared, cache_verified, preprocess_workers, max_rows, progress: see ``cache.TokenCache``.
        min_validation_rows: minimum size of a validation set. The rows of a smaller set are used for training, or dropped if
            the set has separate files; a smaller named set is an error.

    Raises:
        DataError: files are missing, a column of ``fields`` is in no file, or rows are broken (all of them are counted).
        UserError: a named validation set has too few rows.
    """
    encoder = RecordEncoder(tokenizer=tokenizer, vocab_size=vocab_size, apply_chat_template=apply_chat_template, date=date)
    sources = read_data_prefix(data_prefix)
    cache = TokenCache(
        kind=kind,
        folder=Path(cache_dir),
        fields=Fields(columns=fields or {}, labels=Labels.of(labels), json_columns=json_columns, drop=drop),
        encoder=encoder,
        truncation=Truncation(seq_length, truncation_mode, encoder.bos_id),
        shared=cache_shared,
        verified=cache_verified,
        preprocess_workers=preprocess_workers,
        max_rows=max_rows,
        progress=progress,
    )
    opened = _open_all(sources, cache)
    total = FileColumns()
    for _, columns in opened.values():
        total.merge(columns)
    warnings = list(_notes({file: columns for file, (_, columns) in opened.items()}))
    tables = {
        source: concat_tables([opened[file][0] for file in source.files]) for group in sources.values() for source in group
    }
    kept = {}
    for split, group in sources.items():
        kept[split], counts = _kept(group, tables, drop)
        total.dropped = {**total.dropped, **{each: total.dropped.get(each, 0) + counts[each] for each in counts}}
        if left_out := drop_text(counts):
            warnings.append(f"{'rows' if split == WHOLE else split}: left out: {left_out} (model.data.drop)")
    ranges: dict[str, list[Range]]
    if WHOLE in sources:
        cuts = [_cut(source, tables[source], kept[WHOLE][source], splits_string) for source in sources[WHOLE]]
        ranges = {split: [cut[split] for cut in cuts] for split in SPLITS}
        warnings += join_small(ranges, splits_string, min_validation_rows)
    else:
        ranges = {split: [(source, 0, len(kept[split][source])) for source in group] for split, group in sources.items()}
        refuse_small_sets(ranges, min_validation_rows)
        warnings += leave_out_small(ranges, min_validation_rows)
    built = {}
    for split, parts in ranges.items():
        if parts := [part for part in parts if part[1] < part[2]]:
            table = datasets.Dataset(concat_tables([tables[source] for source, *_ in parts]))
            files = [FileOfTable(file, len(opened[file][0])) for source, *_ in parts for file in source.files]
            index = _index(parts, tables, kept[WHOLE if WHOLE in sources else split], seed)
            built[split] = make(table=table, index=index, files=files)
    of_sets = {name: validation_split(name) for name in validation_names(data_prefix)}
    validation = {name: built[split] for name, split in of_sets.items() if split in built}
    return Splits(
        train=built.get("train"),
        validation=validation,
        test=built.get("test"),
        labels=cache.fields.labels.text(total.labels),
        prompts=_prompts_text(encoder, built.get("train")) if total.texts else "",
        left_out=drop_text(total.dropped),
        special_tokens=total.special_tokens_text(),
        warnings=tuple(warnings),
    )


def _prompts_text(encoder: RecordEncoder, train: KTODataset | DPODataset | None) -> str:
    """Describe how prompts of plain text are tokenised; empty if the first of them needs no chat template."""
    if encoder.apply_chat_template:
        return "plain text as user messages of the model's chat template (model.data.apply_chat_template)"
    if train is not None and encoder.is_untemplated(list(train[0].prompt_ids)):
        return "plain text without the model's chat template; model.data.apply_chat_template=true applies it"
    return ""


def _open_all(sources: Mapping[str, Sequence[Source]], cache: TokenCache) -> dict[Path, tuple[Table, FileColumns]]:
    """Return the examples and columns of every file; all files are read before an error about broken rows is raised."""
    broken = RowErrors()
    files = dict.fromkeys(file for group in sources.values() for source in group for file in source.files)
    opened = cache.open(list(files), broken=broken)
    found = {column for _, columns in opened.values() for column in columns.found}
    if missing := [column for column in cache.fields.columns.values() if column not in found]:
        has = ", ".join(sorted(found)) or "none"
        raise DataError(f"model.data.fields must name columns of the rows, got {missing[0]}; the columns are {has}")
    broken.raise_if_any()
    return {file: (table, columns) for file, (table, columns) in opened.items() if table is not None}


def _notes(of_files: Mapping[Path, FileColumns]) -> Iterator[str]:
    """Yield a warning for each note about a file, or one for all files with the same columns if there are many."""
    alike: dict[tuple[str, ...], list[Path]] = {}
    for file, columns in of_files.items():
        alike.setdefault(tuple(sorted(columns.unused)), []).append(file)
    for files in alike.values():
        if len(files) <= _NAMED_FILES:
            yield from (f"{data_name(file)}: {note}" for file in files for note in of_files[file].notes())
            continue
        total = FileColumns()
        for file in files:
            total.merge(of_files[file])
        yield from (f"{files[0]} and {len(files) - 1:,} other files: {note}" for note in total.notes())


def _kept(
    group: Sequence[Source], tables: Mapping[Source, Table], drop: Sequence[str]
) -> tuple[dict[Source, np.ndarray], dict[str, int]]:
    """Return the positions [N] that are kept of each source's examples, and the number of repeated ones of each kind."""
    starts = np.cumsum([0, *(len(tables[source]) for source in group)])
    found = repeated(concat_tables([tables[source] for source in group]), drop)
    is_kept = np.ones(starts[-1], dtype=bool)
    for places_M in found.values():
        is_kept[places_M] = False
    kept = {source: np.flatnonzero(is_kept[slice(*ends)]) for source, ends in zip(group, pairwise(starts), strict=True)}
    return kept, {kind: len(places_M) for kind, places_M in found.items()}


def _cut(source: Source, table: Table, kept_N: np.ndarray, splits_string: str | None) -> dict[str, Range]:
    def is_second_of_pair(place: int) -> bool:
        first, second = (table.slice(int(kept_N[each]), 1).column("line")[0].as_py() for each in (place - 1, place))
        return bool(first == second)

    shares = split_shares("1" if splits_string is None else splits_string, len(kept_N))
    ranges = split_ranges(len(kept_N), shares, is_second_of_pair)
    return {split: (source, start, stop) for split, (start, stop) in zip(SPLITS, ranges, strict=True)}


def _index(
    parts: Sequence[Range], tables: Mapping[Source, Table], kept: Mapping[Source, np.ndarray], seed: int
) -> np.ndarray:
    """Return the positions [N] of the rows of a split in the concatenated tables of its sources, blended by weight."""
    begins = accumulate((len(tables[source]) for source, *_ in parts), initial=0)
    places = [begin + kept[source][start:stop] for begin, (source, start, stop) in zip(begins, parts, strict=False)]
    whole, firsts = np.concatenate(places), np.cumsum([0, *map(len, places)])
    if weights := [source.weight for source, *_ in parts if source.weight is not None]:
        chosen, within = blend([len(own) for own in places], weights, seed=seed)
        return whole[firsts[chosen] + within]
    return whole


def split_ranges(num_rows: int, shares: Sequence[Fraction], joined: Callable[[int], bool]) -> list[tuple[int, int]]:
    """Split rows 0 .. num_rows-1 into contiguous ranges (start, stop), one for each share; the shares sum to 1.

    The split uses ranges instead of random sampling, so that answers to the same prompt, which are usually adjacent in a
    file, stay in the same split. ``joined`` returns whether row i must be in the same split as row i-1.
    """
    cuts = [0]
    for k in range(1, len(shares)):
        cut = max(round(num_rows * sum(shares[:k])), cuts[-1])
        while 0 < cut < num_rows and joined(cut):
            cut += 1
        cuts.append(cut)
    return list(pairwise([*cuts, num_rows]))


def join_small(ranges: dict[str, list[Range]], splits_string: str | None, min_validation_rows: int) -> list[str]:
    """Move the validation rows to the training split, in place, if there are too few; return warnings, also about test rows.

    ``ranges`` were made from ``splits_string``: those of a source are contiguous, in the order of ``SPLITS``.
    """
    rows = _num_rows(ranges)
    total, found, warnings = sum(rows.values()), rows["validation"], []
    shares = None if splits_string is None else read_splits_string(splits_string)
    if found < max(min_validation_rows, 1) and (splits_string == AUTO or (shares is not None and shares[1])):
        if found:
            ranges["train"] = [
                (source, start, stop)
                for (source, start, _), (_, _, stop) in zip(ranges["train"], ranges["validation"], strict=True)
            ]
            ranges["validation"] = []
        what = (
            f"{found} of {total} rows are too few and are used for training" if found else f"no row, of {total} rows in all"
        )
        percent = max(10, min(50, -(-100 * MIN_VALIDATION_ROWS // max(1, total))))
        more = f"{100 - percent},{percent}"
        warnings.append(f'validation: {what}; set model.data.splits_string="{more}" for more, or null for no validation')
    if rows["test"]:
        remedy = f"remove the third number of model.data.splits_string={splits_string}"
        warnings.append(f"test: nothing uses these {rows['test']} of {total} rows; {remedy}")
    return warnings


def leave_out_small(ranges: dict[str, list[Range]], min_validation_rows: int) -> list[str]:
    """Drop an unnamed validation set, in place, if it has too few rows; return warnings about it and about test rows."""
    rows, warnings = _num_rows(ranges), []
    if 0 < rows.get("validation", 0) < min_validation_rows:
        ranges["validation"] = []
        text = f"a split of {rows['validation']} row is dropped, at least {min_validation_rows} are needed"
        warnings.append(f"validation: {text}; add rows (model.data.data_prefix)")
    if "test" in rows:
        warnings.append(f"test: nothing uses these {rows['test']} rows; remove them from model.data.data_prefix")
    return warnings


def refuse_small_sets(ranges: Mapping[str, Sequence[Range]], min_validation_rows: int) -> None:
    """Raise a UserError if named validation sets have too few rows; they are not dropped, as their metrics may be needed."""
    small = [f"{n} in {split}" for split, n in _num_rows(ranges).items() if split not in SPLITS and n < min_validation_rows]
    if small:
        least = f"at least {min_validation_rows} rows in each validation set"
        raise UserError(
            f"model.data.data_prefix must give {least}, got {', '.join(small)}; add rows, or leave such sets out"
        )


def _num_rows(ranges: Mapping[str, Sequence[Range]]) -> dict[str, int]:
    return {split: sum(stop - start for _, start, stop in parts) for split, parts in ranges.items()}


def blend(sizes: Sequence[int], weights: Sequence[Fraction], *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mix sources in exact proportion, in an order that keeps every segment close to this proportion.

    An epoch of the blend is the shortest one in which each source has its share and every row of every source is used at
    least once. No row is repeated before all other rows of its source were used. ``weights`` are above 0, in any unit.

    Returns (source [N], row within the source [N]), int64. Raises UserError if an epoch would use the rows more than a
    hundred times on average.
    """
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    length = max(-(-size // share) for size, share in zip(sizes, shares, strict=True))
    if length > _MAX_REPEATS * sum(sizes):
        raise UserError(
            f"a blend must not repeat its rows more than {_MAX_REPEATS} times: an epoch of {sizes} rows with the weights "
            f"{[float(weight) for weight in weights]} would have {length} rows; raise the weight of the large files"
        )
    # Shares of the epoch in rows: rounded down, or up for those with the largest remainders, so that they sum to ``length``.
    counts = [int(length * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - length * shares[k], k))
    for k in by_remainder[: int(length) - sum(counts)]:
        counts[k] += 1
    logger.info("blend: an epoch of %d rows takes %s rows from sources of %s rows", length, counts, list(sizes))
    rows = []
    for k, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        passes = [np.random.default_rng((seed, k, i)).permutation(size) for i in range(-(-count // size))]
        rows.append(np.concatenate(passes)[:count])
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.argsort(places, kind="stable")
    source = np.repeat(np.arange(len(counts)), counts)
    return source[order], np.concatenate(rows)[order]


def repeated(table: Table, kinds: Collection[str]) -> dict[str, np.ndarray]:
    """Return the positions [M] of duplicates and contradictions among the examples of a table, if ``kinds`` has them.

    Examples are compared by their token ids after truncation and their labels. The first of several equal examples is no
    duplicate; all examples of a contradiction are returned.
    """
    if not {DUPLICATES, CONTRADICTIONS} & set(kinds):
        return {}
    keys_N, opposites_N = (np.array(keys, dtype=np.uint64) for keys in zip(*_keys(table), strict=True))
    found = {}
    if DUPLICATES in kinds:
        first = np.unique(keys_N, return_index=True)[1]
        found[DUPLICATES] = np.setdiff1d(np.arange(len(keys_N)), first)
    if CONTRADICTIONS in kinds:
        found[CONTRADICTIONS] = np.flatnonzero(np.isin(opposites_N, keys_N))
    return found


def _keys(table: Table) -> Iterator[tuple[int, int]]:
    """Yield a hash of each example, and of the example that would contradict it."""
    is_pair = "chosen_ids" in table.column_names
    answers = ("chosen_ids", "rejected_ids") if is_pair else ("response_ids",)
    for batch in table.to_batches():
        prompts, *sides = (_lists(batch.column(name)) for name in ("prompt_ids", *answers))
        labels = [True] * len(prompts) if is_pair else batch.column("desirable").to_pylist()
        for prompt, label, *of_row in zip(prompts, labels, *sides, strict=True):
            yield _hash(prompt, *of_row, label), _hash(prompt, *of_row[::-1], label if is_pair else not label)


def _lists(column: object) -> list[bytes]:
    """Return the bytes of each list of a column of token ids."""
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()  # type: ignore[attr-defined]
    return [values[start:stop].tobytes() for start, stop in pairwise(offsets)]


def _hash(prompt: bytes, *parts: bytes | bool) -> int:
    whole = blake2b(digest_size=8)
    for part in (prompt, *parts):
        content = bytes([part]) if isinstance(part, bool) else part
        whole.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(whole.digest(), "little")
