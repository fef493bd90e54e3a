"""Labels of answers: the values that mean desirable and undesirable, and the values found in the label columns of a file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from nemo_kto.errors import UserError, printable, show

# Values of a desirable and of an undesirable answer. Labels are compared as text, without case, see :func:`label_text`.
VOCABULARIES = (
    ("true", "false"),
    ("1", "0"),
    ("1", "-1"),
    ("yes", "no"),
    ("up", "down"),
    ("good", "bad"),
    ("thumbs_up", "thumbs_down"),
    ("like", "dislike"),
    ("chosen", "rejected"),
    ("desirable", "undesirable"),
    ("\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}"),
)
_KEY = "model.data.labels"
_CLASSES = ("desirable", "undesirable")
_UNLABELLED = "unlabelled"  # values that stand for no label
_VARIANTS = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")  # of emoji: coloured, and colours of skin
_MAX_VALUES = 100  # maximum number of values of a column that are counted separately
_OTHERS = "other values"
_MAX_LISTED = 10
_MAX_CHARACTERS = 200  # of a value; more are ignored
_PLAIN = re.compile(r"[A-Za-z0-9_+.-]+", re.ASCII)  # in a command line, other text needs quotes

LabelCounts = dict[str, dict[str, list[int]]]  # label column -> text of a value -> [rows, first line]


def label_text(value: object) -> str:
    """Return a label as text: without case, with _ in the place of spaces, and 1 in the place of +1 and 1.0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int):
        return show(value)
    text = _VARIANTS.sub("", "_".join(value[:_MAX_CHARACTERS].split()).lower()) if isinstance(value, str) else show(value)
    if re.fullmatch(r"[+-]?\d+(\.0+)?", text):
        return text.split(".")[0].removeprefix("+")
    return re.sub(r"(?<=[a-z])-(?=[a-z])", "_", text)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Values of labels: those of :data:`VOCABULARIES`, or those given by ``model.data.labels``.

    Raises UserError if one of the classes has no value, or a value is in both.
    """

    desirable: tuple[str, ...] = ()
    undesirable: tuple[str, ...] = ()
    unlabelled: tuple[str, ...] = ()  # besides a blank one; rows that ``model.data.drop`` leaves out

    def __post_init__(self) -> None:
        if bool(self.desirable) != bool(self.undesirable):
            missing = "undesirable" if self.desirable else "desirable"
            raise UserError(f"must have values for both classes, got none for {missing}; e.g. {_EXAMPLE}")
        counts = Counter(chain(*map(set, (self.desirable, self.undesirable, self.unlabelled))))
        if twice := sorted(text for text, classes in counts.items() if classes > 1):
            raise UserError(f"must have each value in one class, got {printable(twice[0])} in two; remove one")

    @classmethod
    def of(cls, values: Mapping[Any, Sequence[object]] | None) -> Labels:
        """Return the labels with the given values of "desirable" and "undesirable"; the common ones if None."""
        if values is None:
            return cls()
        if unknown := sorted(set(map(str, values)) - {*_CLASSES, _UNLABELLED}):
            raise UserError(f"must be {_EXAMPLE}, got values for {printable(unknown[0], 60)}")
        return cls(**{name: tuple(map(label_text, values.get(name, ()))) for name in (*_CLASSES, _UNLABELLED)})

    @classmethod
    def parse(cls, text: str) -> Labels:
        """Return the labels of a command line, in the form of ``model.data.labels``; the common ones if it is empty."""
        found = {name: values.split(",") for name, values in re.findall(r"(\w+)\s*:\s*\[([^\]]*)\]", text)}
        if text and not found:
            raise UserError(f"must be {_EXAMPLE}, got {text}")
        return cls.of({name: [value.strip().strip("'\"") for value in values] for name, values in found.items()} or None)

    def is_blank(self, value: object) -> bool:
        """Return whether a value is no label."""
        return value == "" or label_text(value) in self.unlabelled

    def find(self, text: str) -> bool | None:
        """Return whether a label means desirable; None if it is none of the values."""
        if self.desirable:
            return True if text in self.desirable else False if text in self.undesirable else None
        return next((text == good for good, bad in VOCABULARIES if text in (good, bad)), None)

    def errors(self, counts: LabelCounts) -> Iterator[tuple[int, int, str]]:
        """Yield (rows, first line, error) for each column with an unknown value, or with values of several vocabularies."""
        for column, values in counts.items():
            wrong = [text for text in values if self.find(text) is None]
            if not wrong and not self.desirable:
                of_one = max((set(pair) & values.keys() for pair in VOCABULARIES), key=lambda each: _rows(values, each))
                wrong = [text for text in values if text not in of_one]
            if wrong:
                first = min(values[text][1] for text in wrong)
                yield _rows(values, wrong), first, f'"{column}" must be {self._wanted()}, got {self._found(values)}'

    def _wanted(self) -> str:
        if self.desirable:
            return f"one of {', '.join(map(_shown, (*self.desirable, *self.undesirable)))} ({_KEY})"
        return f"two values of one kind, such as true and false, {', '.join(map('/'.join, VOCABULARIES[1:]))}"

    def _found(self, values: Mapping[str, Sequence[int]]) -> str:
        """Return the values with their numbers of rows, most frequent first, and the remedy."""
        by_count = sorted(values, key=lambda text: (-values[text][0], text))
        more = len(by_count) - _MAX_LISTED
        listed = [f"{_shown(text)} ({_count(values[text][0])})" for text in by_count[:_MAX_LISTED]]
        got = ", ".join(listed) + (f" and {more} others" if more > 0 else "")
        good, bad = [[text for text in by_count if self.find(text) is kind] for kind in (True, False)]
        unknown = [text for text in by_count if self.find(text) is None]
        if len(unknown) == len(by_count) == 2:
            setting, remark = _setting(unknown[:1], unknown[1:]), " or the other way round"
        else:
            setting, remark = _setting(good or ["..."], bad or ["..."]), " with all values"
            if good and bad and self.desirable == ():
                setting, remark = _setting(good, bad, unknown), ", where unlabelled rows are left out"
        if unknown == [""]:
            return f"{got}; fill in the blank labels, or leave these rows out with 'model.data.drop=[unlabelled]'"
        return f"{got}; correct or remove the other rows, or set '{_KEY}={setting}'{remark}"

    def text(self, counts: LabelCounts) -> str:
        """Return which value was taken for which; empty if there are no labels."""
        columns = []
        for column, values in counts.items():
            classes = []
            for name, kind in zip(_CLASSES, (True, False), strict=True):
                found = sorted(text for text in values if self.find(text) is kind)
                if found:
                    classes.append(f"{', '.join(map(_shown, found))} is {name}")
            if classes:
                columns.append(f"{column}: {'; '.join(classes)}")
        return ", ".join(columns)


def add_label(counts: LabelCounts, column: str, text: str, *, rows: int = 1, line: int) -> None:
    """Count a label, in place."""
    values = counts.setdefault(column, {})
    if text not in values and len(values) >= _MAX_VALUES:
        text = _OTHERS
    before, first = values.get(text, (0, line))
    values[text] = [before + rows, min(first, line)]


def _rows(values: Mapping[str, Sequence[int]], texts: Sequence[str] | set[str]) -> int:
    return sum(values[text][0] for text in texts)


def _shown(text: str) -> str:
    return printable(text, 60) or '""'


def _count(rows: int) -> str:
    return f"{rows:,} row{'s' * (rows != 1)}"


def _setting(desirable: Sequence[str], undesirable: Sequence[str], unlabelled: Sequence[str] = ()) -> str:
    good, bad, none = (
        ",".join(each if _PLAIN.fullmatch(each) else json.dumps(printable(each, 60), ensure_ascii=False) for each in texts)
        for texts in (desirable, undesirable, unlabelled)
    )
    return f"{{desirable:[{good}],undesirable:[{bad}]{f',unlabelled:[{none}]' if none else ''}}}"


_EXAMPLE = _setting(["up"], ["down"])
