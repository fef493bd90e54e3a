"""Assertions about messages: what they must name, never their wording."""

from __future__ import annotations


def assert_names(message: object, *parts: str) -> None:
    """Assert that a message (a text, or an exception) contains each part: key, value, remedy, or file and line."""
    text = str(message)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} missing in: {text}"
