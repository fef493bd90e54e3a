"""Rows that are left out of a data set: ``model.data.drop``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from nemo_kto.errors import UserError, printable

if TYPE_CHECKING:
    from datasets.table import Table

UNLABELLED, EMPTY_ANSWERS, LOST_TEXT = "unlabelled", "empty_answers", "lost_text"
DUPLICATES, CONTRADICTIONS = "duplicates", "contradictions"
# Each kind of row, described for a message.
DROPS = {
    UNLABELLED: "without a label",
    EMPTY_ANSWERS: "with an empty answer",
    LOST_TEXT: "with text that the chat template leaves out or misplaces",
    DUPLICATES: "equal to an earlier one",
    CONTRADICTIONS: "whose answer also has the other label, or of a pair whose answers are also swapped",
}
DEFAULT_DROPS = (UNLABELLED,)


def check_drops(kinds: Collection[str]) -> None:
    """Raise UserError unless all are keys of :data:`DROPS`."""
    if unknown := sorted(set(kinds) - set(DROPS)):
        raise UserError(f"must list names out of {', '.join(DROPS)}, got {printable(unknown[0], 60)}; [] keeps all rows")


def drop_text(counts: Mapping[str, int]) -> str:
    """Return the numbers of rows that were left out, such as "3 rows without a label"; empty if there are none."""
    return ", ".join(f"{count:,} row{'s' * (count != 1)} {DROPS[kind]}" for kind, count in counts.items() if count)


def is_empty_answer(answer: str | Sequence[Mapping[str, object]]) -> bool:
    """Return whether an answer has neither text nor calls."""
    if isinstance(answer, str):
        return not answer.strip()
    return not any(message.get("tool_calls") or str(message.get("content") or "").strip() for message in answer)


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
