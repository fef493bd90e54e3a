"""Results of `make gpu`: a line of JSON for each measurement, so that a run that is stopped loses only one.

A line has the ``step``, the ``name`` of the measurement, its result (``found``), and the ``key`` of sources and versions. A
step is what the newest key has of it: measurements of other sources are never mixed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADER, END = "header", "end"  # names of the line of versions, and of the last line of a step


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Measurements in a file with one key."""

    file: Path
    key: str

    def append(self, step: str, name: str, found: Mapping[str, Any]) -> None:
        """Add a measurement; it is on the disk when this returns."""
        torn = self.file.exists() and self.file.stat().st_size and not self.file.read_bytes().endswith(b"\n")
        with self.file.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps({"key": self.key, "step": step, "name": name, "found": found}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, step: str) -> dict[str, dict[str, Any]]:
        """Return the measurements of a step by name, the newest of each name, in the order of their first lines."""
        found: dict[str, dict[str, Any]] = {}
        for line in self._read():
            if line["step"] == step:
                found[line["name"]] = line["found"]
        return found

    def has(self, step: str, name: str) -> bool:
        """Return whether a measurement was made without an error."""
        return "error" not in self.of(step).get(name, {"error": "not measured"})

    def measure(self, step: str, name: str, measurement: Callable[[], Mapping[str, Any]]) -> None:
        """Make a measurement that is missing; an error is a line too, and does not end the program."""
        if self.has(step, name):
            return
        try:
            found = measurement()
        except Exception as error:  # of any library on a machine that nobody has tried
            first = next(iter(str(error).strip().splitlines()), "")
            found = {"error": f"{type(error).__name__}: {first[:300]}"}
        print(f"{step}, {name}: {json.dumps(found)[:600]}", file=sys.stderr, flush=True)
        self.append(step, name, found)

    def _read(self) -> Iterator[dict[str, Any]]:
        return (line for line in read(self.file) if line["key"] == self.key)


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, except one that a kill has torn."""
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(text)


def newest_of(file: Path, step: str) -> Lines | None:
    """Return the lines with the newest key that has measurements of a step; None if there are none."""
    keys = [line["key"] for line in read(file) if line["step"] == step]
    return Lines(file=file, key=keys[-1]) if keys else None
