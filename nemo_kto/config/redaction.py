"""Passwords and tokens are left out of all that is written or said of a configuration: files, loggers, messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_kto.utils.files import publish_file

if TYPE_CHECKING:
    from nemo_kto.config.schema import RunConfig

HIDDEN = "***"
_MIN_LENGTH = 8  # of a secret in the environment; a shorter one would be found in words too
_SECRET = r"(?:api_?key|access_?key|token|password|passwd|secret)"  # nosec B105  # names of secrets
_NAME = re.compile(rf"(?:^|_){_SECRET}$", re.IGNORECASE)
_NAMED = re.compile(rf"\b((?:\w*_)?{_SECRET}\s*[:=]\s*)(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s,'\"\]}}]+)", re.IGNORECASE)
_IN_TEXT = (
    (re.compile(r"(?<=://)[^\s'\"]+(?=@)"), HIDDEN),  # who logs in to a server: user:password, or a token
    (re.compile(rf"([?&][\w.-]*{_SECRET}=)[^&#\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),  # Hugging Face's tokens
)


def redacted(text: str) -> str:
    """The text without passwords in URLs, tokens of Hugging Face, and secrets that the environment holds by their names."""
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    held = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _MIN_LENGTH}
    for value in sorted(held, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def redact_file(file: Path) -> None:
    """Take secrets out of a text file of another program, if it is there: what redacted() finds, and what a name shows."""
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    if (public := _NAMED.sub(rf"\1{HIDDEN}", redacted(text))) != text:
        with publish_file(file) as writing:
            writing.write_text(public, encoding="utf-8")


def public_config(config: RunConfig) -> dict[str, object]:
    """The configuration as it may be written and logged; a value whose key is called a secret is left out as a whole."""
    return {str(key): _public(value) for key, value in config.model_dump().items()}


def _public(value: object) -> object:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key, inner) else _public(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_public(inner) for inner in value]
    return value


def _is_secret(key: object, value: object) -> bool:
    return isinstance(value, str) and bool(_NAME.search(str(key)))
