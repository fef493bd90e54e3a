"""Removal of secrets from text that is written or printed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from nemo_kto.utils.files import publish_file

HIDDEN = "***"
_MIN_LENGTH = 8  # of a secret in the environment; a shorter one would also match ordinary words
_SECRET = r"(?:api_?key|access_?key|token|password|passwd|secret)"  # nosec B105  # names of secrets
_NAME = re.compile(rf"(?:^|_){_SECRET}$", re.IGNORECASE)
_NAMED = re.compile(rf"\b((?:\w*_)?{_SECRET}\s*[:=]\s*)(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s,'\"\]}}]+)", re.IGNORECASE)
_IN_TEXT = (
    (re.compile(r"(?<=://)[^\s'\"]+(?=@)"), HIDDEN),  # credentials in a URL: user:password, or a token
    (re.compile(rf"([?&][\w.-]*{_SECRET}=)[^&#\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),  # Hugging Face's tokens
)


def redacted(text: str) -> str:
    """Redact passwords in URLs, Hugging Face tokens, and values of environment variables whose names mark secrets."""
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    secrets = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _MIN_LENGTH}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def redact_file(file: Path) -> None:
    """Redact the secrets in another program's text file, and values assigned to names that mark secrets (api_key)."""
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    if (public := _NAMED.sub(rf"\1{HIDDEN}", redacted(text))) != text:
        with publish_file(file) as writing:
            writing.write_text(public, encoding="utf-8")


def redacted_value(value: object) -> object:
    """Redact the strings in nested mappings and lists; values under a secret's name are replaced as a whole."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        secret = {key for key, inner in value.items() if isinstance(inner, str) and _NAME.search(str(key))}
        return {key: HIDDEN if key in secret else redacted_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_value(inner) for inner in value]
    return value
