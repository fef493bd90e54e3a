"""Mistakes that the user can correct: what the command line prints without a traceback, with exit status 2."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MAX_LINE = 2000  # characters of a line of a message


def printable(text: str, length: int = 300) -> str:
    """Text from outside in one line of a message: control characters are escaped, and the middle of a long one left out."""
    if len(text) > length:
        half = (length - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def show(value: object, length: int = 60) -> str:
    """A value as it is named in a message, in at most ``length`` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


class UserError(ValueError):
    """The message says what is wrong, which value was found, and what to do.

    It may quote files of others: what would control the terminal is escaped, and lines are of limited length.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(printable(line, _MAX_LINE) for line in message.split("\n")))


class ConfigError(NamedTuple):
    """One mistake in a configuration.

    Attributes:
        key: whose value is wrong.
        text: constraint, value found, remedy.
        reads: further keys the verdict depends on; while one of those is wrong itself, the verdict means nothing.
        about_files: a file is not on this machine, and may be on another one.
    """

    key: str
    text: str
    reads: tuple[str, ...] = ()
    about_files: bool = False

    def __str__(self) -> str:
        return str(UserError(f"{self.key} {self.text}"))


def either(names: Sequence[str]) -> str:
    """The names in a sentence: a, b or c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def error_of(call: Callable[[], object]) -> str | None:
    """The message of the ValueError that the call raises; None if it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def import_object(path: str) -> object:
    """What package.module.NAME names; the module may be in the working directory.

    Raises:
        UserError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:  # the script of an installed command has its own folder there instead
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's and may raise anything
        raise UserError(f"must be a path that can be imported, got {path}; {type(error).__name__}: {error}") from error
