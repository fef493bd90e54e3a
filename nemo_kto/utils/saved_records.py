"""Files that an earlier run wrote, read through a schema: what does not fit it is left out, and named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from nemo_kto.errors import plural
from nemo_kto.utils.files import MAX_LINE_BYTES, open_file, read_bytes, read_lines

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
