"""Splits, blends and the cache of tokenised rows."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.batches.splits import blend
from nemo_kto.data.rows.data_sources import UNNAMED
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.tokens.chat_template import RecordEncoder
from tests.helpers import fork_server
from tests.helpers.messages import Message, raises
from tests.unit.data.tiny_data import (
    TOKENIZER,
    chatml_tokenizer,
    llama_tokenizer,
    named,
    numbered_rows,
    prompts,
    splits,
    train_split,
    write_rows,
)


def test_rows_round_trip_through_the_cache(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(7))
    dataset = train_split(str(path), tmp_path)
    assert len(dataset) == 7
    row = dataset[5]
    assert TOKENIZER.decode(row.prompt_ids) == "row 5:"
    assert TOKENIZER.decode(row.response_ids) == " answer 5<|im_end|>"
    assert isinstance(row.prompt_ids, np.ndarray)
    assert row.prompt_ids.dtype == np.int32
    assert [each.desirable for each in dataset.__getitems__([5, 0, 5])] == [False, True, False]
    assert dataset.counts.desirable == 4


def test_rows_are_truncated_to_seq_length(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "abcdefgh" * 9, "response": "x", "preference": "chosen"}])
    ends = {}
    for mode in ("keep_end", "keep_start"):
        dataset = train_split(path, tmp_path, seq_length=8, truncation_mode=mode)
        assert len(dataset[0].prompt_ids) == 6
        ends[mode] = TOKENIZER.decode(dataset[0].prompt_ids)
    assert ("abcdefgh" * 9).endswith(ends["keep_end"])
    assert ("abcdefgh" * 9).startswith(ends["keep_start"])


def test_splits_string_partitions_a_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(50))
    built = splits(path, tmp_path, "80,12,8")
    assert prompts(built.train) == named(40)
    assert prompts(built.validation[UNNAMED]) == named(46, first=40)
    assert prompts(built.test) == named(50, first=46)


def test_both_rows_of_a_pair_stay_in_one_split(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": f"row {i}:", "chosen": "y", "rejected": "n"} for i in range(9)])
    built = splits(path, tmp_path, "1,1")
    assert prompts(built.train) == [name for name in named(5) for _ in range(2)]
    assert prompts(built.validation[UNNAMED]) == [name for name in named(9, first=5) for _ in range(2)]
    assert built.test is None


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "b.jsonl", numbered_rows(3, "b"))
    write_rows(folder / "a.jsonl", numbered_rows(2, "a"))
    (folder / "notes.txt").write_text("not data")
    for prefix in (folder, [str(folder)], {"train": folder}):
        built = splits(prefix, tmp_path)
        assert prompts(built.train) == named(2, "a") + named(3, "b")
        assert (built.validation, built.test) == ({}, None)


def test_a_folder_with_files_named_after_splits(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "validation"):
        write_rows(folder / f"{name}.jsonl", numbered_rows(3, name))
    built = splits(folder, tmp_path, "98,1,1")
    assert prompts(built.train) == named(3, "train")
    assert prompts(built.validation[UNNAMED]) == named(3, "validation")
    assert built.test is None
    write_rows(folder / "more.jsonl", numbered_rows(1))
    with raises(DataError, "files", "train", "validation", "more.jsonl"):
        splits(folder, tmp_path)


@pytest.mark.parametrize("weights", [(0.7, 0.3), ("0.7", "0.3"), (7, 3)])
def test_a_weighted_blend_has_the_exact_proportion(tmp_path: Path, weights: tuple) -> None:
    a = write_rows(tmp_path / "a.jsonl", numbered_rows(14, "a"))
    b = write_rows(tmp_path / "b.jsonl", numbered_rows(12, "b"))
    found = prompts(splits([weights[0], str(a), weights[1], str(b)], tmp_path).train)
    assert len(found) == 40
    uses = Counter(found)
    assert {uses[name] for name in named(14, "a")} == {2}
    assert {uses[name] for name in named(12, "b")} == {1}
    assert set(found[:10]) & set(named(12, "b"))
    assert sum(name.startswith("a") for name in found[:20]) == 14
    assert found == prompts(splits([weights[0], str(a), weights[1], str(b)], tmp_path).train)
    assert found != prompts(splits([weights[0], str(a), weights[1], str(b)], tmp_path, seed=6).train)


def test_a_blend_with_fractions_of_files(tmp_path: Path) -> None:
    a = str(write_rows(tmp_path / "a.jsonl", numbered_rows(10, "a")))
    b = str(write_rows(tmp_path / "b.jsonl", numbered_rows(20, "b")))
    built = splits([1, a, 2, b], tmp_path, "50,50")
    assert sorted(prompts(built.train)) == sorted(named(5, "a") + named(10, "b"))
    assert sorted(prompts(built.validation[UNNAMED])) == sorted(named(10, "a", first=5) + named(20, "b", first=10))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_properties_of_blends(sizes: list[int], weights: list[int], seed: int) -> None:
    shares = [Fraction(weight, sum(weights[: len(sizes)])) for weight in weights[: len(sizes)]]
    source, row = blend(sizes, shares, seed=seed)
    length = len(source)
    for k, size in enumerate(sizes):
        mine = row[source == k]
        assert abs(len(mine) - length * shares[k]) < 1
        assert len(mine) >= size
        for start in range(0, len(mine), size):
            assert len(set(mine[start : start + size])) == len(mine[start : start + size])
        for stop in range(1, length):  # every beginning is close to the proportion
            assert abs((source[:stop] == k).sum() - stop * shares[k]) <= len(sizes)
    assert any(len(row[source == k]) - size <= 1 + 1 / shares[k] for k, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("nowhere.jsonl", Message("nowhere.jsonl")),
        ([], Message("file", "folder", "list")),
        ([0.5, "a.jsonl", 0.5], Message("file", "3")),
        ([0.5, "a.jsonl", 0, "a.jsonl"], Message("0", "file", "a.jsonl")),
        (["a.jsonl", 0.5], Message("list", "files", "file", "0.5")),
        ({"train": "a.jsonl", "val": "a.jsonl"}, Message("train", "validation", "test", "val")),
        (".", Message("folder", "files", "none")),
    ],
)
def test_invalid_data_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: object, words: Message) -> None:
    write_rows(tmp_path / "a.jsonl", numbered_rows(2))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty" if prefix == "." else tmp_path)
    with raises(DataError, *words.parts):
        splits(prefix, tmp_path)


@pytest.mark.parametrize("text", ["", "a,b", "0,1,1", "1,2,3,4", "1,-1"])
def test_invalid_splits_string(tmp_path: Path, text: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(2))
    with raises(ValueError, "auto", "first", "0", "98,2"):
        splits(path, tmp_path, text)


def test_errors_of_reading_and_tokenising_are_listed_together(tmp_path: Path) -> None:
    bad_label = {"prompt": "p", "response": "r", "preference": "good"}
    no_prompt = {"prompt": "", "response": "r", "preference": "chosen"}
    a = write_rows(tmp_path / "a.jsonl", [*numbered_rows(2), bad_label, no_prompt])
    b = write_rows(tmp_path / "b.jsonl", [no_prompt])
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(DataError) as error:
        splits([str(a), str(b), str(tmp_path / "c.jsonl")], tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0] == "4 broken rows:"
    assert sorted(line.split()[0] for line in lines[1:]) == [f"{a}:3:", f"{a}:4:", f"{b}:1:", f"{tmp_path / 'c.jsonl'}:1:"]
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_is_used_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[int] = []
    encode = RecordEncoder.encode
    monkeypatch.setattr(RecordEncoder, "encode", lambda self, rows: tokenised.append(len(rows)) or encode(self, rows))
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(3))

    def rows_tokenised(**changes: Any) -> int:
        tokenised.clear()
        splits(path, tmp_path, **changes)
        return sum(tokenised)

    assert rows_tokenised() == 3
    assert rows_tokenised() == 0
    assert rows_tokenised(seed=6) == 0
    assert rows_tokenised(seq_length=31) == 3
    assert rows_tokenised(truncation_mode="keep_start") == 3
    assert rows_tokenised(fields={"completion": "response"}) == 3
    assert rows_tokenised(tokenizer=llama_tokenizer()) == 3
    assert rows_tokenised(tokenizer=chatml_tokenizer("another template")) == 3
    assert rows_tokenised() == 0
    write_rows(path, numbered_rows(4))
    assert rows_tokenised() == 4
    os.utime(path, ns=(1, 1))
    assert rows_tokenised() == 0
    assert not [file for file in (tmp_path / "cache").iterdir() if file.name.startswith(".")]


def python(code: str, *arguments: object, fork: bool = True) -> list[str]:
    """Lines printed by ``code`` in a fresh interpreter; it finds the tests' own modules."""
    root = Path(__file__).resolve().parents[3]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet, "PYTHONPATH": fork_server.search_path(root)}
    command = ["-c", textwrap.dedent(code), *map(str, arguments)]
    if fork:
        preload = ("nemo_kto.data.batches.dataset", "tests.unit.data.tiny_data")
        done = fork_server.run(command, cwd=Path.cwd(), env=environment, preload=preload)
    else:
        done = subprocess.run([sys.executable, *command], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


READ = """
    import sys
    from pathlib import Path
    from functools import partial
    from nemo_kto.data.tokens.cache import KTO_EXAMPLES
    from nemo_kto.data.tokens.chat_template import RecordEncoder
    from nemo_kto.data.batches.dataset import KTODataset
    from nemo_kto.data.batches.splits import build_splits
    from tests.unit.data.tiny_data import chatml_tokenizer

    def memory(kind):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(kind))

    if sys.argv[2] == "must not tokenise":
        RecordEncoder.encode = None
    tokenizer = chatml_tokenizer()
    build = partial(build_splits, kind=KTO_EXAMPLES, make=KTODataset)
    arguments = dict(tokenizer=tokenizer, seq_length=32, truncation_mode="keep_end", seed=5)
    # A first, small file, so that what is loaded on first use is not counted.
    build(data_prefix=sys.argv[1] + "/small.jsonl", splits_string=None, cache_dir=sys.argv[1] + "/c", **arguments)
    before, own = memory("VmRSS"), memory("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    built = build(
        data_prefix=sys.argv[1] + "/a.jsonl", splits_string="9,1", cache_dir=sys.argv[1] + "/cache", **arguments
    )
    print(len(built.train), built.train[len(built.train) // 2].prompt_ids.tolist())
    print(memory("RssAnon") - own, memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_many_rows_take_little_memory(tmp_path: Path) -> None:
    write_rows(tmp_path / "small.jsonl", numbered_rows(20))
    write_rows(tmp_path / "a.jsonl", numbered_rows(200_000))
    lines = python(READ, tmp_path, "tokenise", fork=False)
    grown, peak = map(float, lines[1].split())
    # As Python lists these rows take 200 MB and more; the index takes 1.6 MB. The peak counts mapped pages of the file too.
    assert grown < 40, f"{grown} MiB after tokenising"
    assert peak < 80, f"{peak} MiB while tokenising"
    grown, _ = map(float, python(READ, tmp_path, "must not tokenise", fork=False)[1].split())
    assert grown < 10, f"{grown} MiB after reading"


def test_concurrent_processes_share_the_cache(tmp_path: Path) -> None:
    for name in ("a", "small"):
        write_rows(tmp_path / f"{name}.jsonl", numbered_rows(3000))
    with ThreadPoolExecutor(2) as pool:
        first = [lines[0] for lines in pool.map(lambda _: python(READ, tmp_path, "tokenise"), range(2))]
    assert first[0].startswith("2700 [")
    assert first == first[:1] * 2
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".arrow", ".json"]
