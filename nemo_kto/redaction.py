"""Removal of passwords and tokens from messages, logs and files."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import quote

HIDDEN = "***"
_MIN_LENGTH = 8  # of a secret in the environment; a shorter one would also match ordinary words
_SECRET = r"(?:api_?key|access_?key|token|password|passwd|secret|notify)"  # nosec B105  # names of secrets
_SECRET_NAME = re.compile(rf"(?:^|_){_SECRET}$", re.IGNORECASE)
_IN_TEXT: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # credentials in a URL: user:password, or a token
    (re.compile(r"(?<=://)[^\s'\"]+"), lambda url: HIDDEN + url[0][at:] if (at := url[0].rfind("@")) > 0 else url[0]),
    (re.compile(rf"([?&][\w.-]*{_SECRET}=)[^&#\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),  # Hugging Face's tokens
)
_ASSIGNED = re.compile(rf"\b((?:\w*_)?{_SECRET}\s*[:=]\s*)(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s,'\"\]}}]+)", re.IGNORECASE)
_BACKSLASHES = r"\\++"


def redacted(text: str) -> str:
    """Redact passwords in URLs, Hugging Face tokens, and values of environment variables whose names mark secrets."""
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    secrets = {value.strip() for name, value in os.environ.items() if is_secret(name)}
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


def is_secret(name: str) -> bool:
    """Return whether the value of a key or variable with this name is a secret."""
    return _SECRET_NAME.search(name) is not None


def redacted_value(value: object) -> object:
    """Redact the strings in nested mappings and lists; values under a secret's name are replaced as a whole."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        secret = {key for key, inner in value.items() if isinstance(inner, str) and is_secret(str(key))}
        return {key: HIDDEN if key in secret else redacted_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_value(inner) for inner in value]
    return value


def redacted_file_text(text: str) -> str:
    """Redact the text of another program's file, also the values assigned to names that mark secrets (api_key)."""
    return _ASSIGNED.sub(rf"\1{HIDDEN}", redacted(text))
