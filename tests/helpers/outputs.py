"""Outputs of commands, compared with the text files of tests/data/outputs, which `make goldens` rewrites."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "data" / "outputs"


def assert_output(name: str, text: str, **places: object) -> None:
    """Assert that a text is that of the file ``name``, where each of ``places``, such as a folder, has its own name."""
    for place, value in places.items():
        text = text.replace(str(value), place)
    file = FOLDER / f"{name}.txt"
    if os.environ.get("WRITE_GOLDENS"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    assert text == expected, f"{file} has another text; `make goldens` rewrites it"
