"""The base of all sections of the configuration, and the types and constraints that pydantic does not bring."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from nemo_kto.errors import either

Value = TypeVar("Value")


class Section(BaseModel):
    """A section: frozen, without unknown keys; an integer must be one, a float may be given as an integer, and is finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class Remedy:
    """What to do about a value that is out of range; {key} stands for the key."""

    text: str


@dataclass(frozen=True)
class Check:
    """A constraint of one key that is a function of a value of the right type; see :func:`check`."""

    holds: Callable[..., object]
    text: str
    remedy: str = ""

    def __call__(self, value: Value) -> Value:
        if not self.holds(value):
            raise PydanticCustomError("check", "{text}", {"text": self.text, "remedy": self.remedy})
        return value


def check(holds: Callable[..., object], text: str, remedy: str = "") -> AfterValidator:
    """The metadata of a field with a :class:`Check`: ``text`` follows "must"; ``remedy`` is as in :class:`Remedy`."""
    return AfterValidator(Check(holds, text, remedy))


def one_of(names: Sequence[str]) -> AfterValidator:
    """The metadata of a field whose value is one of the names, where another module lists them."""
    return check(lambda value: value in names, f"be {either(names)}")


Name = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
"""A string; a name such as 32 or 1.5, which YAML reads as a number, is one too."""

FilePath = Annotated[Name, AfterValidator(os.path.expanduser)]
"""A path; ~ is the home folder."""
