"""Ranges of rows that form a split, and blends of several sources by weight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from nemo_kto.data.rows.data_sources import AUTO, SPLITS, Source, read_splits_string
from nemo_kto.errors import UserError

Range = tuple[Source, int, int]  # rows [start, stop) of a source

logger = logging.getLogger(__name__)

_MAX_REPEATS = 100


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
        more = "90,10" if total >= 20 else "50,50"
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
