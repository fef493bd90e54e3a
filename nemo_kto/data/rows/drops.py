"""Rows that are left out of a data set: ``model.data.drop``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nemo_kto.errors import UserError, printable

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
