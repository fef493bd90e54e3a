"""Base class of all configuration sections, and field types and constraints that pydantic does not provide."""

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
    """Base class of sections: frozen, strictly typed, without unknown keys.

    An integer field accepts only integers. A float field also accepts integers; its value must be finite.
    """

    # defer_build: only the type of the whole configuration is validated, so that no section needs a validator of its own
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


@dataclass(frozen=True)
class Remedy:
    """Remedy for an out-of-range value, as shown in the error message; {key} stands for the key."""

    text: str


@dataclass(frozen=True)
class MustStay:
    """The value must stay the same in a resumed run. On a section: for its keys without a marker."""

    meaning: str = "the same"  # what is compared
    verbatim: bool = True  # compare the value itself; otherwise the facts that ``run.resume`` derives from it


@dataclass(frozen=True)
class MayChange:
    """The value may change in a resumed run; ``meaning`` is the effect. On a section: for its keys without a marker."""

    meaning: str


@dataclass(frozen=True)
class Check:
    """A constraint on one key: a predicate on a value that already has the right type; see :func:`check`."""

    holds: Callable[..., object]
    text: str
    remedy: str = ""

    def __call__(self, value: Value) -> Value:
        if not self.holds(value):
            raise PydanticCustomError("check", "{text}", {"text": self.text, "remedy": self.remedy})
        return value


def check(holds: Callable[..., object], text: str, remedy: str = "") -> AfterValidator:
    """Return metadata with a :class:`Check`; ``text`` follows "must" in the message, ``remedy`` is as in :class:`Remedy`."""
    return AfterValidator(Check(holds, text, remedy))


def one_of(names: Sequence[str]) -> AfterValidator:
    """Return field metadata that restricts a value to ``names``, for names that another module defines."""
    return check(lambda value: value in names, f"be {either(names)}")


Name = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
"""A string; numbers are converted, because YAML reads names such as 32 or 1.5 as numbers."""

FilePath = Annotated[Name, AfterValidator(os.path.expanduser)]
"""A path; ~ is expanded to the home folder."""
