"""Damaged files of the token cache are replaced with one warning and never used for training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.messages import Message
from tests.unit.data.test_dataset import named, prompts, splits
from tests.unit.data.tiny_data import numbered_rows, write_rows


def flip(content: bytes) -> bytes:
    """One bit of a token id is another."""
    place = content.index(b"r\0\0\0o\0\0\0w\0\0\0") if b"r\0\0\0o\0\0\0w\0\0\0" in content else len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "about is empty": ("json", lambda _: b""),
    "about is no JSON": ("json", lambda content: content[:-5]),
    "about is a list": ("json", lambda _: b"[]"),
    "about is binary": ("json", lambda _: b"\xff\xfe\0"),
    "about has no hash": ("json", lambda _: b'{"rows": 7}'),
    "about has other fields": ("json", lambda content: content.replace(b'"rows"', b'"row"')),
    "arrow is empty": ("arrow", lambda _: b""),
    "arrow is cut": ("arrow", lambda content: content[: len(content) // 2]),
    "arrow lacks its end": ("arrow", lambda content: content[:-8]),
    "arrow is garbage": ("arrow", lambda content: b"x" * len(content)),
    "arrow ends in zeros": ("arrow", lambda content: content[:1000] + bytes(len(content) - 1000)),
    "arrow has a bit flipped": ("arrow", flip),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_files_are_replaced(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, change = DAMAGES[damage]
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(7))
    splits(path, tmp_path)
    (cached,), (file,) = (tmp_path / "cache").glob("*.arrow"), (tmp_path / "cache").glob(f"*.{kind}")
    content = file.read_bytes()
    assert change(content) != content
    file.write_bytes(change(content))
    for warnings in ([Message(f"{cached}")], []):
        caplog.clear()
        assert prompts(splits(path, tmp_path).train) == named(7)
        assert caplog.messages == warnings


@pytest.mark.parametrize("kind", ["json", "arrow"])
def test_one_of_two_cache_files_is_missing(kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(7))
    splits(path, tmp_path)
    (file,) = (tmp_path / "cache").glob(f"*.{kind}")
    file.unlink()
    assert prompts(splits(path, tmp_path).train) == named(7)
    assert file.exists()
