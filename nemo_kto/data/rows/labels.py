"""Labels of answers: the values that mean desirable and undesirable, those of a file, and the balance of both classes.

With n_D desirable and n_U undesirable rows, the authors of KTO keep w_D n_D / (w_U n_U) between 1 and 4/3 (Ethayarajh et
al. 2024, arXiv 2402.01306, section 4.2, equation 8). If rows have weights, n_D and n_U are the sums of these weights.
"""

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


MIN_BALANCE, MAX_BALANCE = 1.0, 4 / 3
_WARN_BELOW, _WARN_ABOVE = 0.8, 1.6  # a balance slightly out of that range makes no difference that one could measure
# Learning rates recommended for KTO by TRL's documentation, independent of the size of the data.
MIN_LR, MAX_LR = 5e-7, 5e-6


def loss_balance(desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float) -> float | None:
    """Return w_D n_D / (w_U n_U); None if one class is absent or has zero weight.

    Examples:
        >>> loss_balance(30, 60, 1.0, 1.0)
        0.5
    """
    good, bad = desirable * desirable_weight, undesirable * undesirable_weight
    return good / bad if good and bad else None


def balanced_weights(
    desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float
) -> tuple[float, float]:
    """Return w_D and w_U for which the balance is in its range, or unchanged if it is undefined.

    The weight of the class with too little weight is raised by the smallest sufficient factor.

    Examples:
        >>> balanced_weights(30, 60, 1.0, 1.0)
        (2.0, 1.0)
        >>> balanced_weights(80, 20, 1.0, 1.0)
        (1.0, 3.0)
    """
    balance = loss_balance(desirable, undesirable, desirable_weight, undesirable_weight)
    if balance is None or MIN_BALANCE <= balance <= MAX_BALANCE:
        return desirable_weight, undesirable_weight
    if balance < MIN_BALANCE:
        return desirable_weight / balance, undesirable_weight
    return desirable_weight, undesirable_weight * balance / MAX_BALANCE


def balance_warning(desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float) -> str | None:
    """Return a warning about weights that are far from balancing the classes; None if they are not."""
    balance = loss_balance(desirable, undesirable, desirable_weight, undesirable_weight)
    if balance is None or _WARN_BELOW <= balance <= _WARN_ABOVE:
        return None
    good, bad = balanced_weights(desirable, undesirable, desirable_weight, undesirable_weight)
    figure = f"{desirable_weight:.4g} * {desirable:.10g} / ({undesirable_weight:.4g} * {undesirable:.10g}) = {balance:.4g}"
    return (
        "desirable_loss_weight * desirable rows / (undesirable_loss_weight * undesirable rows) should be from 1 to 4/3, "
        f"got {figure}; set model.kto.desirable_loss_weight={good:.4g} and model.kto.undesirable_loss_weight={bad:.4g}, "
        "or model.kto.auto_balance=true"
    )


def balance_text(desirable: float, undesirable: float, desirable_weight: float, undesirable_weight: float) -> str:
    """Describe the balance of the classes, with the loss weights unless both are 1."""
    balance = loss_balance(desirable, undesirable, desirable_weight, undesirable_weight)
    if balance is None:
        return f"all examples are {'desirable' if desirable * desirable_weight else 'undesirable'}"
    weights = desirable_weight, undesirable_weight
    products = "" if weights == (1, 1) else " with loss weights {:.4g} and {:.4g}".format(*weights)
    return f"desirable / undesirable = {balance:.4g}{products} (recommended: 1 to 4/3)"


def one_class_warning(desirable: float, undesirable: float, lr: float) -> str | None:
    """Return a warning about training rows of a single class, unless the learning rate is in the recommended range."""
    if (desirable and undesirable) or MIN_LR <= lr <= MAX_LR:
        return None
    kind = "desirable" if desirable else "undesirable"
    return (
        f"all training rows are {kind}: without the other class the learning rate should be from {MIN_LR:.0e} to "
        f"{MAX_LR:.0e} (as TRL recommends for KTO), got {lr:.4g}; set model.optim.lr, and train for more epochs if necessary"
    )
