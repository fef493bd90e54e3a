"""Functions of users that score answers, as `--score` gets them."""

from __future__ import annotations

import sys
from typing import Any


def length(prompt: object, answer: str) -> int:
    return len(answer)


def short(prompt: object, answer: str) -> bool:
    return len(answer) < 8


def thoughtful(prompt: object, answer: str) -> bool:
    """Thoughts are given as most models write them."""
    return answer == "<think>\nSeven has no divisors.\n</think>\n\nYes."


def even(prompt: object, answer: str) -> bool:
    return len(answer) % 2 == 0


def length_unless_equal(prompt: object, answer: str) -> float:
    """Both models answer "Yes.", which needs no score."""
    return len(answer) if answer != "Yes." else 1 / 0


def partly(prompt: object, answer: str) -> Any:
    return {"Never": 10**400, "Water!": "none"}.get(answer, 1)


class Silent(BaseException):
    def __str__(self) -> str:
        raise OSError

    __repr__ = __str__


def ends(prompt: object, answer: str) -> None:
    if answer == "Water.":
        sys.exit(0)
    raise BaseExceptionGroup("several", [KeyboardInterrupt()]) if answer == "Why?" else Silent()


def unshown(prompt: object, answer: str) -> object:
    return Silent()


def broken(prompt: object, answer: str) -> object:
    return None if answer == "Why?" else 1 / (len(answer) - 6)
