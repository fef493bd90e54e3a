"""Errors that the user can correct, which end a command with status 2, and the removal of secrets from all messages."""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

_MAX_LINE = 2000  # maximum length of one line of a message, in characters
HIDDEN = "***"
_MIN_LENGTH = 8  # of a secret in the environment; a shorter one would also match ordinary words
SECRET = r"(?:api_?key|access_?key|token|password|passwd|secret)"  # nosec B105  # names of secrets
SECRET_NAME = re.compile(rf"(?:^|_){SECRET}$", re.IGNORECASE)
_IN_TEXT: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # credentials in a URL: user:password, or a token
    (re.compile(r"(?<=://)[^\s'\"]+"), lambda url: HIDDEN + url[0][at:] if (at := url[0].rfind("@")) > 0 else url[0]),
    (re.compile(rf"([?&][\w.-]*{SECRET}=)[^&#\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),  # Hugging Face's tokens
)
_WINDOW = 2**13  # characters at the ends of a text that is cut, in which secrets are searched
_BACKSLASHES = r"\\++"


def redacted(text: str) -> str:
    """Redact passwords in URLs, Hugging Face tokens, and values of environment variables whose names mark secrets."""
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    secrets = {value.strip() for name, value in os.environ.items() if SECRET_NAME.search(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = without_secret(text, secret)
    return text


def without_secret(text: str, secret: str) -> str:
    """Redact one secret, also as libraries quote it: with escapes, as bytes, in a URL, in JSON."""
    return text if len(secret) < _MIN_LENGTH else _quoted(secret).sub(HIDDEN, text)


@lru_cache(maxsize=64)
def _quoted(secret: str) -> re.Pattern[str]:
    pattern = r"(?<!\\)" if _forms(secret[0])[0].startswith("\\") else ""  # begins before all backslashes: linear time
    for part in re.findall(r"\s+|\\+|\S", secret):
        forms = "|".join(dict.fromkeys(form for char in part for form in _forms(char)))
        pattern += rf"(?:(?:\s|{forms})++|(?:\s|{forms}|[+?])++)" if part.isspace() else f"(?:{forms})"
    return re.compile(pattern, re.IGNORECASE)


def _forms(char: str) -> list[str]:
    """Return patterns of a character in quoted text; the backslashes of an escape may be missing or doubled."""
    if char == "\\" or (char.isascii() and char.isalnum()):
        return [_BACKSLASHES, "(?:%5C)+"] if char == "\\" else [char]
    raw = char.encode("utf-8", "surrogateescape")
    decoded = [char, raw.decode("latin-1"), raw.decode("utf-8", "replace")]
    texts = [*decoded, *(written(each)[1:-1] for each in decoded for written in (repr, ascii, json.dumps)), repr(raw)[2:-1]]
    texts += [html.escape(char), quote(raw, safe=""), *([] if char.isascii() or char.isspace() else ["?"])]
    return [rf"\\*+{re.escape(text.lstrip(chr(92))).replace(chr(92) * 2, _BACKSLASHES)}" for text in texts]


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
