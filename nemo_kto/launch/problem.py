"""A mistake in a configuration, and the constraints that several keys have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from nemo_kto.data.records import DataError


class Problem(NamedTuple):
    """One mistake.

    Attributes:
        key: whose value is wrong.
        text: constraint, value got, remedy.
        reads: further keys the verdict rests on; while one of those is wrong itself, the verdict means nothing.
        about_files: something is not on this machine, and might be on another one.
    """

    key: str
    text: str
    reads: tuple[str, ...] = ()
    about_files: bool = False

    def __str__(self) -> str:
        return f"{self.key} {self.text}"


Found = Iterator[Problem]


def at_least(key: str, value: float, least: float, remedy: str = "") -> Found:
    """A number must not be below ``least``."""
    if not value >= least:
        yield Problem(key, f"must be at least {least}, got {value}" + (f"; {remedy}" if remedy else ""))


def one_of(key: str, value: Any, names: Sequence[str], remedy: str = "") -> Found:
    """A value must be one of a few."""
    if value not in names:
        yield Problem(key, f"must be {either(names)}, got {value}" + (f"; {remedy}" if remedy else ""))


def either(names: Sequence[str]) -> str:
    """The names in a sentence: a, b or c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def raises(call: Callable[[], Any]) -> str | None:
    """What the call complains of; None if nothing."""
    try:
        call()
    except (ValueError, DataError) as error:
        return str(error)
    return None
