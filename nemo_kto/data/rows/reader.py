"""Readers of data files: rows become records, or prompts. Unused columns are counted, or refused if they matter."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from nemo_kto.data.rows.forms import find_form, row_place
from nemo_kto.data.rows.labels import LabelCounts, Labels, add_label, label_text
from nemo_kto.data.rows.normalise import check_json_columns, in_our_form, is_tie, read_values
from nemo_kto.data.rows.records import (
    COLUMNS,
    COMMON_LABELS,
    DEFAULT_DROPS,
    EMPTY_ANSWERS,
    LABEL_COLUMNS,
    LOST_TEXT,
    SOURCE,
    UNLABELLED,
    DataError,
    DPORecord,
    KTORecord,
    LabelError,
    LastRowError,
    LostTextError,
    PromptRecord,
    Row,
    RowError,
    check_drops,
    drop_text,
    is_conversation_with_answer,
    is_empty_answer,
    pair_of_row,
    prompt_of_row,
    records_of_row,
    used_columns,
)
from nemo_kto.data.rows.row_files import WHOLE_FILE, FilePart, read_rows
from nemo_kto.errors import printable
from nemo_kto.utils.files import MAX_LINE_BYTES, open_file, read_lines

if TYPE_CHECKING:
    from nemo_kto.data.tokens.chat_template import EncodedExample

Record = TypeVar("Record", KTORecord, DPORecord)

_MEDIA = frozenset("image images video videos audio audios".split())
# Common column names for text that precedes the prompt, and for the prompt or a part of it.
_BEFORE_PROMPT = frozenset("system system_prompt system_message history".split())
_PROMPT_LIKE = _BEFORE_PROMPT | frozenset(
    "question questions instruction instructions input inputs query problem context document passage "
    "user messages conversation conversations dialog dialogue".split()
)
_MAX_LISTED = 50  # maximum number of columns listed in a message
# Common names of columns that model.data.fields can map to ours, by our name.
_ANSWER_LIKE = frozenset("answer output generation reply".split())
_CHOSEN_LIKE = frozenset("chosen_answer good_answer preferred winner better".split())
_REJECTED_LIKE = frozenset("rejected_answer bad_answer dispreferred loser worse".split())
_LABEL_LIKE = frozenset(
    "thumb thumbs vote feedback rating score verdict like liked good is_good desirable is_desirable accepted correct "
    "sentiment judgement judgment annotation kto_tag helpfulness overall_score quality".split()
)
# Parts of column names, such as user_question and bot_answer.
_PARTS_OF_PROMPT = frozenset("question prompt instruction query".split())
_PARTS_OF_ANSWER = frozenset("answer response completion output reply generation".split())
_PARTS_OF_LABEL = frozenset("rating label feedback thumb thumbs vote".split())


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Mapping of column names (``model.data.fields``), labels and columns in JSON; a file without them is read unchanged.

    Raises DataError if a name is not a known column, or a column of the files is used twice.
    """

    columns: Mapping[str, str] = field(default_factory=dict)  # known column (``COLUMNS``) -> its name in the files
    labels: Labels = COMMON_LABELS  # model.data.labels
    json_columns: Collection[str] | None = None  # model.data.json_columns, by our names
    drop: Collection[str] = DEFAULT_DROPS  # model.data.drop

    def __post_init__(self) -> None:
        check_json_columns(self.json_columns)
        check_drops(self.drop)
        for name in self.columns:
            if name not in COLUMNS:
                remedy = "write {OURS:COLUMN}"
                if self.columns[name] in COLUMNS:
                    remedy = f"did you mean {{{self.columns[name]}:{name}}}?"
                elif near := difflib.get_close_matches(name, COLUMNS, n=1):
                    remedy = f"did you mean {near[0]}?"
                raise DataError(f"must map names out of {', '.join(COLUMNS)} to columns, got {name}; {remedy}")
        if twice := [column for column, times in Counter(self.columns.values()).items() if times > 1]:
            raise DataError(f"must name each column once, got {twice[0]} twice; leave one out")

    def rename(self, row: Row) -> tuple[Row, dict[str, str]]:
        """Return the row with its columns renamed, and for each renamed column its new name -> its name in the file."""
        renamed = {name: column for name, column in self.columns.items() if column in row}
        if not renamed:
            return row, renamed
        hidden = {*renamed, *renamed.values()}
        kept = {name: value for name, value in row.items() if name not in hidden}
        return {**kept, **{name: row[column] for name, column in renamed.items()}}, renamed


@dataclass(kw_only=True)
class FileColumns:
    """Counts of the columns of a file: ``found`` and ``unused`` map a column to the rows that have it, or do not use it."""

    rows: int = 0
    found: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    labels: LabelCounts = field(default_factory=dict)  # of KTO rows that are not pairs
    texts: int = 0  # rows whose prompt is a string, not messages
    dropped: dict[str, int] = field(default_factory=dict)  # kind (``DROPS``) -> rows that were left out
    empty_answers: int = 0  # rows with an empty answer that were kept
    special_tokens: int = 0  # examples or pairs with special tokens of the model within their texts

    def add(self, row: Row, used: Set[str]) -> None:
        """Count the columns of a row; ``used`` are the columns that the row uses. Unused ones may have no value.

        That nemo-kto label says how a row was labelled is not worth a note.
        """
        self.rows += 1
        for column, value in row.items():
            self.found[column] = self.found.get(column, 0) + 1
            of_label = column == SOURCE and isinstance(value, dict)
            if column not in used and value not in (None, "") and not of_label:
                self.unused[column] = self.unused.get(column, 0) + 1

    def merge(self, other: FileColumns) -> None:
        """Add the counts of another part of the file."""
        self.rows += other.rows
        self.texts += other.texts
        self.empty_answers += other.empty_answers
        self.special_tokens += other.special_tokens
        for counts, more in ((self.found, other.found), (self.unused, other.unused), (self.dropped, other.dropped)):
            for column, count in more.items():
                counts[column] = counts.get(column, 0) + count
        for column, values in other.labels.items():
            for text, (rows, first) in values.items():
                add_label(self.labels, column, text, rows=rows, line=first)

    def add_label_errors(self, path: Path, labels: Labels, broken: RowErrors) -> None:
        """Add the rows of ``path`` whose labels are unknown, or not of one vocabulary, to ``broken``."""
        for rows, line, what in labels.errors(self.labels):
            broken.add(path, line, what, count=rows)

    def no_rows(self) -> str:
        """Return an error about a file none of whose rows can be used."""
        if left_out := drop_text(self.dropped):
            return f"the file must have rows that can be used, got {left_out}, which model.data.drop leaves out"
        return "the file must have at least one row, got none; leave it out"

    def drop(self, kind: str) -> None:
        """Count a row that is left out."""
        self.dropped[kind] = self.dropped.get(kind, 0) + 1

    def leaves_out(self, error: RowError, drop: Collection[str]) -> bool:
        """Return whether a row with this error is left out; count it then."""
        if is_left_out := isinstance(error, LostTextError) and LOST_TEXT in drop:
            self.drop(LOST_TEXT)
        return is_left_out

    def keeps(self, answers: Collection[EncodedExample], drop: Collection[str]) -> bool:
        """Return whether a tokenised row with these answers is kept; count what is special about it."""
        is_empty = any(answer.is_empty for answer in answers)
        if is_empty and EMPTY_ANSWERS in drop:
            self.drop(EMPTY_ANSWERS)
            return False
        self.empty_answers += is_empty
        self.special_tokens += any(answer.has_special_tokens for answer in answers)
        return True

    def notes(self) -> Iterator[str]:
        """Yield what was not used as it is: unused columns, rows that were left out, empty answers, special tokens."""
        if self.unused:
            yield f"columns that are not used: {self.unused_text()}"
        if left_out := drop_text(self.dropped):
            yield f"left out: {left_out} (model.data.drop)"
        if self.empty_answers:
            which = f"{self.empty_answers:,} row{'s' * (self.empty_answers != 1)}"
            yield f"an answer is empty in {which}; model.data.drop=[{UNLABELLED},{EMPTY_ANSWERS}] leaves them out"
        if self.special_tokens:
            yield f"{self.special_tokens_text()}; remove them unless the model shall read them as its own"

    def special_tokens_text(self) -> str:
        """Return the number of rows with special tokens within their texts as text; empty if there are none."""
        rows = f"{self.special_tokens:,} row{'s' * (self.special_tokens != 1)}"
        return f"the texts of {rows} contain special tokens of the model" if self.special_tokens else ""

    def unused_text(self) -> str:
        """Return the unused columns as text, such as "id, source (1200 rows)"; empty if all columns are used."""
        by_count: dict[int, list[str]] = {}
        for column, count in sorted(self.unused.items()):
            by_count.setdefault(count, []).append(printable(column, 60))
        parts = []
        for count, columns in sorted(by_count.items(), reverse=True):
            more = len(columns) - _MAX_LISTED
            names = ", ".join(columns[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
            parts.append(f"{names} ({count} row{'s' if count > 1 else ''})")
        return ", ".join(parts)


@dataclass(kw_only=True)
class RowErrors:
    """Collection of broken rows, raised as one error.

    Rows of a file with the same fault are shown once, by the first of them; at most ten different faults are shown.
    """

    SHOWN: ClassVar = 10
    total: int = 0
    shown: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # (file, fault) -> first line, last line, count

    def add(self, path: str | Path, line: int, what: str, *, count: int = 1) -> None:
        """Record that line or row ``line`` (counted from 1) of ``path`` cannot be used, or ``count`` rows from there on."""
        self.total += count
        if (fault := (str(path), what)) in self.shown:
            first, last, rows = self.shown[fault]
            self.shown[fault] = [min(first, line), max(last, line), rows + count]  # answers of a server come in any order
        elif len(self.shown) < self.SHOWN:
            self.shown[fault] = [line, line, count]

    def raise_if_any(self) -> None:
        """Raise one DataError for all recorded rows, if there are any."""
        if not self.total:
            return
        is_complete = self.total == sum(count for *_, count in self.shown.values())
        first = "" if is_complete else f", the first {self.SHOWN} faults"
        lines = [f"{self.total} broken row{'s' if self.total > 1 else ''}{first}:"]
        for (path, what), (line, last, count) in self.shown.items():
            more = f" (the same in {count - 1} more, up to line {last})" if last > line else ""
            lines.append(f"{row_place(path, line)}: {what}{more}")
        raise DataError("\n  ".join(lines))


@dataclass(kw_only=True)
class PartErrors(RowErrors):
    """Collection that keeps all broken rows, so that the rows of several parts can be counted as those of one file."""

    rows: list[tuple[int, str]] = field(default_factory=list)  # line, error

    def add(self, path: str | Path, line: int, what: str, *, count: int = 1) -> None:
        super().add(path, line, what, count=count)
        self.rows.append((line, what))


@dataclass(frozen=True, kw_only=True)
class FileReader:
    """Reader of files that keeps one row in memory at a time."""

    fields: Fields
    broken: RowErrors  # collects unusable rows, so that the caller can read further files before it raises
    max_rows: int | None = None  # of each part

    def kto_records(self, path: str | Path, columns: FileColumns, part: FilePart = WHOLE_FILE) -> Iterator[KTORecord]:
        """Yield the labelled answers of a part of a file, in order, and count its columns in ``columns``."""
        labels = self.fields.labels
        return self._read(path, part, columns, lambda row, line: records_of_row(row, line, labels), as_pair=False)

    def dpo_records(self, path: str | Path, columns: FileColumns, part: FilePart = WHOLE_FILE) -> Iterator[DPORecord]:
        """Yield the pairs of a part of a file, in order, and count its columns in ``columns``."""
        return self._read(path, part, columns, lambda row, line: [pair_of_row(row, line)], as_pair=True)

    def _read(
        self,
        path: str | Path,
        part: FilePart,
        columns: FileColumns,
        records_of: Callable[[Row, int], list[Record]],
        *,
        as_pair: bool,
    ) -> Iterator[Record]:
        has_cells, labels = find_form(path).kind == "csv", self.fields.labels
        for line, given in read_rows(path, part):
            if columns.rows == self.max_rows:
                return
            try:
                if isinstance(given, RowError):
                    raise given
                row, renamed = self.fields.rename(given)
                row = read_values(row, self.fields.json_columns, has_cells=has_cells)
                row, converted = in_our_form(row)
                used = used_columns(tuple(row), as_pair=as_pair) | converted
                columns.add(given, {renamed.get(name, name) for name in used} if renamed else used)
                given_labels = () if as_pair else sorted(used.intersection(LABEL_COLUMNS, row))
                if UNLABELLED in self.fields.drop and (
                    (converted and is_tie(row))
                    or (given_labels and all(labels.is_blank(row[name]) for name in given_labels))
                ):
                    columns.drop(UNLABELLED)
                    continue
                for column in given_labels:
                    add_label(columns.labels, renamed.get(column, column), label_text(row[column]), line=line)
                records = _complete_records(row, line, records_of, as_pair=as_pair)
            except LabelError:  # reported with all values of the file, see ``FileColumns.add_label_errors``
                continue
            except RowError as error:
                self.broken.add(path, line, str(error))
                if isinstance(error, LastRowError):
                    self.broken.raise_if_any()
                continue
            if any(map(_has_empty_answer, records)):
                if EMPTY_ANSWERS in self.fields.drop:
                    columns.drop(EMPTY_ANSWERS)
                    continue
                columns.empty_answers += 1
            columns.texts += isinstance(records[0].prompt, str)
            yield from records


def _complete_records(row: Row, line: int, records_of: Callable[[Row, int], list[Record]], *, as_pair: bool) -> list[Record]:
    """Return the records of a row; RowError if it is unusable, has media, or an unused column holds a part of the prompt."""
    if media := _columns_like(row, _MEDIA):
        raise RowError(f'"{media[0]}" is not supported: models are trained on text only; leave such rows out')
    has_prompt = any(row.get(name) for name in {"prompt", "messages"} & used_columns(tuple(row), as_pair=False))
    try:
        records = records_of(row, line)
    except LabelError:
        raise
    except RowError as error:
        raise RowError(f"{error}{_naming_remedy(row, as_pair=as_pair)}") from error
    prompt = records[0].prompt
    text = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)
    candidates = _columns_like(row, _BEFORE_PROMPT if has_prompt else _PROMPT_LIKE)
    unused = next((column for column in candidates if not _is_contained(row[column], text)), None)
    if unused is not None and has_prompt:
        raise RowError(
            f'"{unused}" would be ignored, but the prompt does not contain it; make "prompt" a list of messages with it '
            f'({{"role": "system", "content": ...}} first), and remove "{unused}"'
        )
    if unused is not None:
        raise RowError(f'"{unused}" would be ignored, and the row has no "prompt"{_naming_remedy(row, as_pair=as_pair)}')
    return records


def _has_empty_answer(record: KTORecord | DPORecord) -> bool:
    answers = (record.chosen, record.rejected) if isinstance(record, DPORecord) else (record.response,)
    return any(map(is_empty_answer, answers))


def _naming_remedy(row: Row, *, as_pair: bool) -> str:
    """Return the end of an error message that suggests a value of model.data.fields; empty if no column looks suitable."""
    names, is_conversation = list[str](), False
    has_pair = any(name in row for name in ("chosen", "rejected", "chosen_response", "rejected_response"))
    if not any(row.get(name) for name in {"prompt", "messages"} & used_columns(tuple(row), as_pair=as_pair)):
        prompts = _columns_like(row, _PROMPT_LIKE) or _columns_with(row, _PARTS_OF_PROMPT)
        if len(prompts) > 1:
            return f'; join {" and ".join(prompts)} into one "prompt" (or "messages" with their roles)'
        is_conversation = [is_conversation_with_answer(row[column]) for column in prompts] == [True]
        name = "messages" if is_conversation else "prompt"
        names += [f"{name}:{column}" for column in prompts if column != name]
    if not has_pair and not is_conversation and not any(name in row for name in ("response", "completion", "messages")):
        pair = [*_columns_like(row, _CHOSEN_LIKE)[:1], *_columns_like(row, _REJECTED_LIKE)[:1]]
        has_pair = len(pair) == 2
        answers = [] if as_pair else (_columns_like(row, _ANSWER_LIKE) or _columns_with(row, _PARTS_OF_ANSWER))[:1]
        names += [f"chosen:{pair[0]}", f"rejected:{pair[1]}"] if has_pair else [f"response:{column}" for column in answers]
    if not as_pair and not has_pair and not any(name in row for name in LABEL_COLUMNS):
        labels = _columns_like(row, _LABEL_LIKE) or _columns_with(row, _PARTS_OF_LABEL)
        labels.sort(key=lambda column: COMMON_LABELS.find(label_text(row[column])) is None)
        names += [f"label:{column}" for column in labels[:1]]
    return f"; name the columns with 'fields={','.join(names)}' (model.data.fields)" if names else ""


def _columns_like(row: Row, names: frozenset[str]) -> list[str]:
    """Return the columns that have one of the names, in any case, and are not empty in this row."""
    found = []
    for column in _names_like(tuple(row), names):
        value = row[column]
        if not (value in (None, "", [], {}) or (isinstance(value, str) and value.isspace())):
            found.append(column)
    return found


def _columns_with(row: Row, parts: frozenset[str]) -> list[str]:
    """Return the columns one of whose words, separated by _, is in ``parts``, if they are not empty in this row."""
    return _columns_like(row, frozenset(name.lower() for name in row if parts.intersection(name.lower().split("_"))))


@lru_cache(maxsize=1024)  # most rows of a file have the same columns
def _names_like(columns: tuple[str, ...], names: frozenset[str]) -> list[str]:
    return [column for column in columns if column.lower() in names]


def _is_contained(value: object, prompt: str) -> bool:
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("content"), str) for part in value):
        return all(part["content"].strip() in prompt for part in value if part.get("role") != "assistant")
    return isinstance(value, str) and value.strip() in prompt


MAX_PROMPTS = 1000


def read_prompts(
    path: str | Path, json_columns: Collection[str] | None = None, *, limit: int | None = MAX_PROMPTS
) -> list[PromptRecord]:
    """Read the prompts of a file: a text (.txt) with one prompt per line, or a data file in any form.

    A row has a "prompt", a string or messages, or "messages"; if its last message is one of the assistant, this is an answer
    and left out, as are all other columns. DataError if the file cannot be read, has broken rows, no prompt or more than
    ``limit``.
    """
    broken, prompts = RowErrors(), list[PromptRecord]()
    for record in _lines(Path(path)) if str(path).endswith(".txt") else _rows(path, json_columns, broken):
        prompts.append(record)
        if limit is not None and len(prompts) > limit:
            raise DataError(f"{path} must have at most {limit:,} prompts, got more; leave some out")
    broken.raise_if_any()
    if not prompts:
        raise DataError(f"{path} must have at least one prompt, got an empty file; write one prompt per line")
    return prompts


def _lines(path: Path) -> Iterator[PromptRecord]:
    number = 1
    try:
        with open_file(path) as file:
            for number, line in enumerate(read_lines(file), start=1):
                if len(line) > MAX_LINE_BYTES:
                    got = "got more; write one prompt per line"
                    raise DataError(f"{path}:{number}: a line must have at most {MAX_LINE_BYTES:,} bytes, {got}")
                if text := line.decode("utf-8-sig").strip():
                    yield PromptRecord(prompt=text, line=number)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: must be text in UTF-8, got a byte that is not; save it as UTF-8") from error


def _rows(path: str | Path, json_columns: Collection[str] | None, broken: RowErrors) -> Iterator[PromptRecord]:
    has_cells = find_form(path).kind == "csv"
    for line, row in read_rows(path):
        try:
            if isinstance(row, RowError):
                raise row
            yield prompt_of_row(in_our_form(read_values(row, json_columns, has_cells=has_cells))[0], line)
        except RowError as error:
            broken.add(path, line, str(error))
