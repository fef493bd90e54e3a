"""Assertions about messages: each contains its parts, in any wording."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def missing(text: str, parts: Sequence[str]) -> list[str]:
    """The parts that the text does not contain as complete words or numbers, at separate places, in any order."""
    absent = []
    for part in sorted(parts, key=len, reverse=True):
        before, after = (r"(?<![\w.-])", r"(?!\w|\.\d)") if re.fullmatch(r"-?[\d.]+", part) else (r"(?<!\w)", r"(?!\w)")
        pattern = (before if re.match(r"[\w-]", part) else "") + re.escape(part) + (after if re.search(r"\w$", part) else "")
        if re.search(pattern, text):
            text = re.sub(pattern, "\0", text, count=1)
        else:
            absent.append(part)
    return absent


def assert_names(message: object, *parts: str) -> None:
    """Assert that a message (a text, or an exception) contains each part: key, value, remedy, or file and line."""
    failure = Message(*parts).failure(str(message))
    assert not failure, failure


class Message:
    """Equals a text (or an exception, or a ConfigError) that names each part.

    Args:
        parts: what every wording must contain: key, value, remedy, or file and line.
    """

    def __init__(self, *parts: str) -> None:
        self.parts = parts
        self._failure = ""

    def __eq__(self, other: object) -> bool:
        self._failure = self.failure(str(other))
        return not self._failure

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        failed = f" <- {self._failure}" if self._failure else ""
        return f"Message({', '.join(map(repr, self.parts))}){failed}"

    def replace(self, old: str, new: str) -> Message:
        """With another text in the parts, as of a string."""
        return Message(*(part.replace(old, new) for part in self.parts))

    def failure(self, text: str) -> str:
        """Why the text is not this message; empty if it is."""
        absent = missing(text, self.parts)
        return f"{absent} missing in: {text}" if absent else ""


def read_cases(file: Path) -> Iterator[tuple[str, list[Message]]]:
    """Each case of a text file: what follows ``$``, and the messages below it, whose parts are separated by bars."""
    for case in file.read_text(encoding="utf-8").split("\n\n"):
        first, *lines = case.strip().splitlines()
        if first.startswith("$ "):
            yield first.removeprefix("$ "), [Message(*line.split(" | ")) for line in lines]


@contextmanager
def raises(error: type[BaseException] | tuple[type[BaseException], ...], *parts: str | Message) -> Iterator[Any]:
    """Like ``pytest.raises``, of an error whose text is ``Message(*parts)``, or the one given."""
    with pytest.raises(error) as caught:
        yield caught
    message = parts[0] if isinstance(parts[0], Message) else Message(*map(str, parts))
    failure = message.failure(str(caught.value))
    assert not failure, failure


def pytest_make_parametrize_id(val: object) -> str | None:
    """A message is called by its parts in the id of a test; tests/conftest.py registers this hook."""
    return ",".join(val.parts)[:50] if isinstance(val, Message) else None


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Messages that a logger gets within the block, on a rank, where pytest's caplog does not reach."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)
