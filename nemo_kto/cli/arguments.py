"""Argument types for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def integer_from(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text}")
        return int(text)

    return read
