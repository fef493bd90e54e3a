"""The fingerprint of a dataset depends on the trained tokens and their order only."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.batches.dataset import DPODataset
from nemo_kto.data.tokens.cache import DPO_EXAMPLES
from tests.helpers.messages import Message
from tests.unit.data.tiny_data import numbered_rows, train_split, write_rows


@pytest.fixture(autouse=True)
def keep_every_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_kto.data.tokens.cache.MIN_KEPT_BYTES", 0)


def fingerprint(data_prefix: object, tmp_path: Path, **changes: Any) -> str:
    return train_split(data_prefix, tmp_path, **changes).fingerprint()


def test_the_fingerprint_depends_on_rows_and_not_on_files(tmp_path: Path) -> None:
    rows = numbered_rows(5)
    a, b = (write_rows(tmp_path / f"{name}.jsonl", rows) for name in "ab")
    b.write_text("\n" + b.read_text().replace("\n", "\n\n"))  # other lines, in another file
    assert fingerprint(str(a), tmp_path) == fingerprint(str(b), tmp_path, cache_dir=tmp_path / "elsewhere")


CHANGES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "a prompt": lambda rows: rows[2].update(prompt=rows[2]["prompt"] + "?"),
    "a label": lambda rows: rows[2].update(preference={"chosen": "rejected"}.get(rows[2]["preference"], "chosen")),
    "the order": lambda rows: rows.reverse(),
    "a row more": lambda rows: rows.append(rows[0]),
    "a row less": lambda rows: rows.pop(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_fingerprint_depends_on_trained_tokens(what: str, tmp_path: Path) -> None:
    rows = numbered_rows(5)
    before = fingerprint(str(write_rows(tmp_path / "a.jsonl", rows)), tmp_path)
    CHANGES[what](rows)
    assert fingerprint(str(write_rows(tmp_path / "b.jsonl", rows)), tmp_path) != before


def test_the_fingerprint_depends_on_token_positions(tmp_path: Path) -> None:
    """Two sets have the same tokens in the same order, with another border between two prompts."""
    rows = [{"prompt": prompt, "response": "r", "preference": "chosen"} for prompt in ("ab", "c")]
    moved = [{"prompt": prompt, "response": "r", "preference": "chosen"} for prompt in ("a", "bc")]
    files = [write_rows(tmp_path / f"{name}.jsonl", found) for name, found in (("a", rows), ("b", moved))]
    assert len({fingerprint(str(file), tmp_path) for file in files}) == 2


def test_the_fingerprint_depends_on_splits_and_blends(tmp_path: Path) -> None:
    a, b = (str(write_rows(tmp_path / f"{name}.jsonl", numbered_rows(count))) for name, count in (("a", 20), ("b", 10)))
    prefixes: list[object] = [[a, b], [b, a], [1, a, 2, b], [2, a, 1, b]]
    assert len({fingerprint(prefix, tmp_path) for prefix in prefixes}) == 4
    assert len({fingerprint([1, a, 2, b], tmp_path, seed=seed) for seed in (1, 2)}) == 2
    assert len({fingerprint(a, tmp_path, splits_string=shares) for shares in ("9,1", "8,2", None)}) == 3


def test_the_fingerprint_depends_on_rewards(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{number}", "chosen": "yes", "rejected": "no"} for number in range(3)]
    rewarded = [{**pair, "chosen_reward": 2.0, "rejected_reward": 1.0} for pair in pairs]
    make = partial(DPODataset, default_chosen_reward=1.0, default_rejected_reward=0.0)
    files = [write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", pairs), ("b", rewarded), ("c", pairs))]
    first, other, again = (fingerprint(str(file), tmp_path, kind=DPO_EXAMPLES, make=make) for file in files)
    assert first == again != other


def test_a_file_is_hashed_once(tmp_path: Path) -> None:
    file = str(write_rows(tmp_path / "a.jsonl", numbered_rows(5)))
    before = fingerprint(file, tmp_path)
    (kept,) = (tmp_path / "cache" / "hashes").iterdir()
    kept.write_text("0" * 64)
    assert fingerprint(file, tmp_path) != before, "the cached hash is used"


@pytest.mark.parametrize(("shared", "folder_mode", "file_mode"), [(False, 0o700, 0o600), (True, 0o755, 0o644)])
def test_cached_rows_are_private_unless_shared(shared: bool, folder_mode: int, file_mode: int, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        fingerprint(str(write_rows(tmp_path / "a.jsonl", numbered_rows(5))), tmp_path, cache_shared=shared)
    finally:
        os.umask(before)
    cache = tmp_path / "cache"
    found = sorted((path.suffix, path.stat().st_mode & 0o777) for path in [cache, *cache.rglob("*")])
    files = [(suffix, file_mode) for suffix in (".arrow", ".json", ".sha256")]
    assert found == [("", folder_mode), ("", folder_mode), *files]


def test_a_damaged_cached_hash_is_recomputed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(5))
    before = fingerprint(str(path), tmp_path)
    (kept,) = (tmp_path / "cache" / "hashes").iterdir()
    kept.write_bytes(b"")
    assert fingerprint(str(path), tmp_path) == before
    assert caplog.messages == [Message(f"{kept}", "damaged")]
