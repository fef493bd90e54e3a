"""Types of the arguments of a command line, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def integer_from(least: int) -> Callable[[str], int]:
    """What makes an integer of an argument of the command line."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text}")
        return int(text)

    return read
