"""Commands of `nemo-kto` and the Python interface; this module defines what several of them use."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from nemo_kto.errors import either


def integer_from(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text}")
        return int(text)

    return read


def number(constraint: str, holds: Callable[[float], bool], *, remedy: str = "") -> Callable[[str], float]:
    """Return an argparse type for finite numbers with a constraint, which is described for the message."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not holds(value):
            raise argparse.ArgumentTypeError(f"must be a number {constraint}, got {text}{remedy}")
        return value

    return read


gigabytes = number("above 0, in 10^9 bytes", lambda value: value > 0, remedy="; e.g. --memory 80")


def run_parser(command: str, description: str, *, words: str = "MODEL DATA KEY=VALUE") -> argparse.ArgumentParser:
    """Return the parser of a command that takes a run as in training: algorithm, words, and the user's configuration."""
    from nemo_kto.algorithms.recipes import RECIPES

    parser = argparse.ArgumentParser(
        prog=f"nemo-kto {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithm", choices=list(RECIPES), help="the algorithm of the run")
    parser.add_argument("words", nargs="*", metavar=words, help="as in training")
    parser.add_argument("--config-name", metavar="FILE", help="your configuration file")
    parser.add_argument("--config-dir", metavar="FOLDER", help="folder of that file")
    return parser


def aligned(rows: Sequence[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Yield the rows of a table as lines of text, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield indent + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def is_set(key: str, overrides: Iterable[str]) -> bool:
    """Return whether an override sets the key."""
    return any(text.lstrip("+").startswith(f"{key}=") for text in overrides)


def gpu_kind(text: str) -> str:
    """Return the key of ``memory.hardware.GPUS`` for an argument in any case, such as H100; argparse's error for another."""
    from nemo_kto.memory.hardware import GPUS

    if text.lower() not in GPUS:
        raise argparse.ArgumentTypeError(f"must be {either(list(GPUS))}, got {text}; for another kind, give --memory GB too")
    return text.lower()
