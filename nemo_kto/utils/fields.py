"""Schemas of configurations and files: fields with constraints, descriptions and error messages; records of earlier runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import pydantic
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from nemo_kto.errors import ConfigError, either, plural, show
from nemo_kto.redaction import HIDDEN, is_secret
from nemo_kto.utils.files import MAX_LINE_BYTES, open_file, read_bytes, read_lines

Value = TypeVar("Value")
_WORDS: dict[object, str] = {
    int: "an integer", float: "a float", bool: "true or false", str: "a string", NoneType: "null", list: "a list",
    dict: "a mapping",
}  # fmt: skip
_MISSING = object()
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


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


Name = Annotated[str, pydantic.Field(strict=False, coerce_numbers_to_str=True)]
"""A string; numbers are converted, because YAML reads names such as 32 or 1.5 as numbers."""

FilePath = Annotated[Name, AfterValidator(os.path.expanduser)]
"""A path; ~ is expanded to the home folder."""


class Field(NamedTuple):
    """One key of a section: its type, and the metadata of the type and of its type arguments."""

    annotation: object
    metadata: list[object]
    resume: MustStay | MayChange | None = None  # marker of the key, else of the innermost section with one
    own_description: str | None = None

    @property
    def section(self) -> type[BaseModel] | None:
        """The class of a section, also of one that may be null; None if the key holds a value."""
        union = get_origin(self.annotation) in (Union, UnionType)
        kind, *others = [
            part for part in (get_args(self.annotation) if union else [self.annotation]) if part is not NoneType
        ]
        return kind if not others and isinstance(kind, type) and issubclass(kind, BaseModel) else None

    @property
    def alternatives(self) -> list[str]:
        """Descriptions of the types that a value may have."""
        if self.section is not None:
            return [f"a section with the keys {', '.join(self.section.model_fields)}"]
        return list(dict.fromkeys(_alternatives(self.annotation)))

    @property
    def checks(self) -> list[Check]:
        """The constraints that are functions (:class:`Check`)."""
        validators = [item.func for item in self.metadata if isinstance(item, AfterValidator)]
        return [check for check in validators if isinstance(check, Check)]

    @property
    def bounds(self) -> str | None:
        """Description of the numeric bounds; None if there are none."""
        found = [item for item in self.metadata if isinstance(item, Ge | Gt | Le | Lt)]
        limit = {name: getattr(item, name) for item in found for name in (type(item).__name__.lower(),)}
        low = f"at least {limit['ge']}" if "ge" in limit else f"above {limit['gt']}" if "gt" in limit else ""
        high = f"at most {limit['le']}" if "le" in limit else f"below {limit['lt']}" if "lt" in limit else ""
        if "ge" in limit and high:
            return f"from {limit['ge']} to {high.removeprefix('at most ')}"
        return " and ".join(filter(None, (low, high))) or None

    @property
    def description(self) -> str:
        """Description of the type and the constraints, for the configuration page and the errors of files."""
        if self.own_description:
            return self.own_description
        texts = [check.text.removeprefix("be ").replace("not be ", "not ") for check in self.checks]
        types = [] if any(text.startswith("an ") for text in texts) else [either(self.alternatives)]
        return ", ".join(filter(None, [*types, self.bounds, *texts]))

    def remedy(self, key: str, own: str = "") -> str:
        """Return the remedy for a wrong value of ``key`` as the end of a sentence; ``own`` precedes that of the metadata."""
        remedies = [own, *(item.text for item in self.metadata if isinstance(item, Remedy))]
        return next((f"; {text.format(key=key)}" for text in remedies if text), "")


def _alternatives(annotation: object) -> Iterator[str]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _alternatives(parts[0])
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _alternatives(part)
    elif origin is Literal:
        yield from map(str, parts)
    elif origin is list and parts != (object,):
        words = [*_alternatives(parts[0])]
        is_literal = get_origin(parts[0]) is Literal
        yield f"a list of {either(words if is_literal else [word.split(maxsplit=1)[1] + 's' for word in words])}"
    else:
        yield _WORDS.get(origin or annotation, str(annotation))


def _metadata(annotation: object) -> list[object]:
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return [*parts[1:], *_metadata(parts[0])]
    return [item for part in parts for item in _metadata(part)] if get_origin(annotation) is not Literal else []


@cache
def names(section: type[BaseModel]) -> Mapping[str, Field]:
    """Return a mapping from dotted name to field for all keys, including sections."""
    return dict(_names(section, "", None))


def _names(section: type[BaseModel], prefix: str, inherited: MustStay | MayChange | None) -> Iterator[tuple[str, Field]]:
    for name, info in section.model_fields.items():
        metadata = [*info.metadata, *_metadata(info.annotation)]
        resume = next((item for item in metadata if isinstance(item, MustStay | MayChange)), inherited)
        field = Field(info.annotation, metadata, resume, info.description)
        yield prefix + name, field
        if field.section is not None:
            yield from _names(field.section, f"{prefix}{name}.", resume)


def echo(value: object, *, quoted: bool = False) -> str:
    """Return a value as error messages show it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value in ("", []):
        return "none" if isinstance(value, list) else "nothing"
    return repr(value) if quoted else str(value)


def mistakes(error: ValidationError, section: type[BaseModel], values: Mapping[str, object]) -> Iterator[ConfigError]:
    """Convert a pydantic ValidationError to ConfigErrors with our messages; the text for an unknown key is empty.

    ``section`` is the type of the whole configuration, ``values`` maps dotted names to values.
    """
    known, found = names(section), dict[str, tuple[Field | None, list[ErrorDetails]]]()
    for detail in error.errors(include_url=False):
        key, field = _locate(detail["loc"], known)
        found.setdefault(key, (field, []))[1].append(detail)
    for key, (field, details) in found.items():
        for text in dict.fromkeys(_texts(key, field, details, values.get(key)) if field is not None else [""]):
            yield ConfigError(key, text)


def _locate(location: Sequence[int | str], known: Mapping[str, Field]) -> tuple[str, Field | None]:
    """Return the key and the field of an error location, without what pydantic appends: union member, list index."""
    path: list[str] = []
    field = None
    for part in location:
        path.append(str(part))
        field = known.get(".".join(path))
        if field is None or field.section is None:
            break
    return ".".join(path), field


def _texts(key: str, field: Field, details: Sequence[ErrorDetails], value: object) -> Iterator[str]:
    if any(detail["type"] == "missing" for detail in details):
        yield f"must be given, got nothing{field.remedy(key, *(check.remedy for check in field.checks[:1]))}"
        return
    violated = [detail for detail in details if detail["type"] in ("check", *_OUT_OF_RANGE)]
    for detail in violated:
        own = detail.get("ctx", {}) if detail["type"] == "check" else {"text": _constraint(field, detail)}
        yield f"must {own['text']}, got {_shown(key, detail['input'])}{field.remedy(key, own.get('remedy', ''))}"
    if not violated:
        typed = any(word.startswith(("a ", "an ", "true")) for word in field.alternatives)
        remedy = "" if typed else field.remedy(key)
        yield f"must be {either(field.alternatives)}, got {echo(value, quoted=typed)}{remedy}"


def _shown(key: str, value: object) -> str:
    return HIDDEN if isinstance(value, str) and is_secret(key.rpartition(".")[2]) else echo(value)


def _constraint(field: Field, detail: ErrorDetails) -> str:
    """Return the constraint that an out-of-range or non-finite value violates, as the text after "must"."""
    if detail["type"] == "finite_number" and field.checks:
        return field.checks[0].text
    infinite = detail["type"] == "finite_number" and (detail["input"] in (math.inf, -math.inf) or not field.bounds)
    return f"be {' and '.join(filter(None, ['finite' if infinite else '', field.bounds]))}"


def file_errors(section: type[BaseModel], content: Mapping[str, object]) -> dict[str, str]:
    """Return a message, by key, for each key of a file's content that violates its type or constraints.

    A message describes the constraints of the whole key, also if only an item of its value is wrong.
    """
    details: Sequence[ErrorDetails] = ()
    try:
        section.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
    messages = {}
    for key, field in dict(_locate(detail["loc"], names(section)) for detail in details).items():
        value: object = content
        for name in key.split("."):
            value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
        assert field is not None  # keys of others are accepted
        got = "but is missing" if value is _MISSING else f"got {show(value)}"
        messages[key] = f"{key} must be {field.description}, {got}"
    return messages


Kind = TypeVar("Kind")
Count = Annotated[int, Ge(0), Lt(2**53)]  # exact as a float
Number = Annotated[float, Gt(-1e100), Lt(1e100)]  # whose square is finite


class Record(BaseModel):
    """Base class of schemas of JSON objects; other keys are accepted."""

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)


def read_lines_as(kind: type[Kind], file: Path, damaged: list[str] | None = None) -> Iterator[Kind]:
    """Yield the lines of JSON in a file as ``kind``, a Record or a dataclass; none if there is no such file.

    Lines that are not valid are left out, and described in ``damaged``, except for a last one that is still being written.
    """
    adapter, wrong, damaged = TypeAdapter(kind), list[int](), [] if damaged is None else damaged
    try:
        with open_file(file) as handle:
            for number, line in enumerate(read_lines(handle), start=1):
                try:
                    yield adapter.validate_json(line, strict=True)
                except ValidationError:
                    wrong += [number] if line.endswith(b"\n") or len(line) > MAX_LINE_BYTES else []
    except FileNotFoundError:
        return
    except OSError as error:
        damaged.append(f"{file.name}, which cannot be read: {error.strerror}")
    if wrong:
        damaged.append(f"{plural(len(wrong), 'line')} of {file.name}, the first is line {wrong[0]:,}")


def read_object_as(schema: type[Record], file: Path, damaged: list[str] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file without the values that ``schema`` rejects; empty if there is no such file.

    A rejected value is left out with its key, or with the whole inner object if that must have it, and named in ``damaged``.
    """
    damaged = [] if damaged is None else damaged
    try:
        content = from_json(read_bytes(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        damaged.append(f"{file.name}, which is not a JSON object")
        return {}
    while keys := _rejected(schema, content):
        for outer, *inner in keys:
            if inner and isinstance(content.get(outer), dict):
                content[outer].pop(inner[0], None)
            else:
                content.pop(outer, None)
        damaged.extend(f"{'.'.join(key)} of {file.name}" for key in keys)
    return content


def _rejected(schema: type[Record], content: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the keys of rejected values, at most two levels deep."""
    try:
        schema.model_validate(content, strict=True)
    except ValidationError as error:
        places = [each["loc"][:-1] if each["type"] == "missing" else each["loc"] for each in error.errors()]
        return list(dict.fromkeys(tuple(map(str, place[:2])) for place in places))
    return []
