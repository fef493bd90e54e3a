"""Errors that the user can correct; the command line prints them without a traceback and exits with status 2."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MAX_LINE = 2000  # maximum length of one line of a message, in characters


def printable(text: str, length: int = 300) -> str:
    """Return untrusted text for one line of a message: control characters escaped, the middle of a long text omitted."""
    if len(text) > length:
        half = (length - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def show(value: object, length: int = 60) -> str:
    """Return the ``repr`` of a value for a message, cut to ``length`` characters."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= length else f"{text[: length - 3]}..."


class UserError(ValueError):
    """An error caused by the user's input; its message states the problem, the value found and the remedy.

    The message may quote files from other sources, so control characters are escaped and the length of lines is limited.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(printable(line, _MAX_LINE) for line in message.split("\n")))


class ConfigError(NamedTuple):
    """One error in a configuration.

    Attributes:
        key: the key whose value is wrong.
        text: the constraint, the value found and the remedy.
        reads: other keys that this error depends on; the error is meaningless if one of those is wrong itself.
        about_files: whether the cause is a missing file, which may exist on another machine.
    """

    key: str
    text: str
    reads: tuple[str, ...] = ()
    about_files: bool = False

    def __str__(self) -> str:
        return str(UserError(f"{self.key} {self.text}"))


def either(names: Sequence[str]) -> str:
    """Join names into an enumeration: "a, b or c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def error_of(call: Callable[[], object]) -> str | None:
    """Return the message of the ValueError that ``call`` raises, or None if it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def import_object(path: str) -> object:
    """Import the object with the dotted path package.module.NAME; the module may be in the working directory.

    Raises:
        UserError: If the object cannot be imported.
    """
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:  # the script of an installed command has its own folder in sys.path instead
        sys.path.append(os.getcwd())
    try:
        imported = importlib.import_module(module)
        if not hasattr(imported, name):
            known = ", ".join(each for each in vars(imported) if not each.startswith("_")) or "nothing"
            raise UserError(f"must be a path that can be imported, got {path}; {module} has {printable(known, 300)}")
        return getattr(imported, name)
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        raise UserError(f"must be a path that can be imported, got {path}; {type(error).__name__}: {error}") from error


def refuse_broken(name: str, text: str) -> None:
    """Raise a UserError for a byte that is not UTF-8, or a lone surrogate, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be text in UTF-8, got {show(text[error.start :])}; save it as UTF-8") from None
