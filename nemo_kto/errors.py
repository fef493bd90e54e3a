"""Errors that the user can correct, which end a command with status 2, and text for their messages."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nemo_kto.redaction import redacted

_MAX_LINE = 2000  # maximum length of one line of a message, in characters
_WINDOW = 2**13  # characters at the ends of a text that is cut, in which secrets are searched


def printable(text: str, length: int = 300) -> str:
    """Return untrusted text for one line of a message: control characters escaped, the middle of a long text omitted."""
    if len(text) > length:
        half, is_long = (length - 5) // 2, len(text) > _WINDOW
        head, tail = redacted(text[:_WINDOW]), redacted(text[-_WINDOW:])  # first, because a cut leaves a part of a secret
        text = f"{head[:half]} ... {tail[-half:]}" if is_long or len(head) > length else head
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def show(value: object, length: int = 60) -> str:
    """Return the ``repr`` of a value for a message, cut to ``length`` characters."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value that is nested too deeply"
    except Exception:  # of a class of the user
        return f"a value of the type {type(value).__name__}"
    text = text if len(text) <= length else redacted(text[:_WINDOW])
    return text if len(text) <= length else f"{text[: length - 3]}..."


def describe(error: BaseException) -> str:
    """Return type and text of an exception, without secrets; its type alone if it has no text, or fails to write it."""
    try:
        text = redacted(str(error))
    except Exception:  # of a class of the user
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class UserError(ValueError):
    """An error caused by the user's input; its message states the problem, the value found and the remedy.

    The message may quote files from other sources, so secrets are redacted, control characters escaped, and lines cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(printable(line, _MAX_LINE) for line in redacted(message).split("\n")))


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
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code may raise anything, and end the process by SystemExit
        raise UserError(f"must be a path that can be imported, got {path}; {describe(error)}") from error


def refuse_broken(name: str, text: str) -> None:
    """Raise a UserError for a byte that is not UTF-8, or a lone surrogate, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be text in UTF-8, got {show(text[error.start :])}; save it as UTF-8") from None
