"""Tokenising a file in parts, in one process or in several, gives the same result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.rows import row_files as files
from nemo_kto.data.rows.reader import Fields, FileColumns, RowErrors
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.rows.row_files import WHOLE_FILE, FilePart, file_parts, number_of_parts, read_rows
from nemo_kto.data.tokens import workers as worker_processes
from nemo_kto.data.tokens.cache import DPO_EXAMPLES, KTO_EXAMPLES, TokenCache
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.data.tokens.workers import map_parts, number_of_processes
from nemo_kto.errors import UserError, error_of
from tests.helpers import fork_server
from tests.helpers.messages import Message, raises
from tests.unit.data import part_work
from tests.unit.data.tiny_data import chatml_tokenizer, numbered_rows, write_rows

REPOSITORY = Path(__file__).resolve().parents[3]
ENCODER = RecordEncoder(tokenizer=chatml_tokenizer())
WHOLE = 2**40  # bytes of a part


def opened(
    path: Path, folder: Path, *, part_bytes: int, workers: int = 1, **changes: object
) -> tuple[Dataset, FileColumns, str]:
    """The examples of a file, its columns, and the errors of its rows."""
    broken = RowErrors()
    settings: dict = {"kind": KTO_EXAMPLES, "truncation": Truncation(32, "keep_end", None), "encoder": ENCODER, **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MIN_BYTES", part_bytes)
        cache = TokenCache(folder=folder, fields=Fields(), preprocess_workers=workers, **settings)
        ((examples, columns),) = cache.open([path], broken=broken).values()
    table = examples and Dataset(examples)
    return table, columns, error_of(broken.raise_if_any) or ""


def arrow_file(folder: Path) -> bytes:
    (file,) = folder.glob("*.arrow")
    return file.read_bytes()


def mixed_rows(count: int) -> list[dict]:
    """Strings and messages, with a column that is not used in some."""
    rows = numbered_rows(count)
    for number in range(0, count, 3):
        row = rows[number]
        user, answer = {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}
        rows[number] = {"messages": [user, answer], "label": number % 2 == 0, "id": number}
    return rows


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(1, 40), st.integers(1, 9))
def test_parts_are_whole_lines_with_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], part_bytes: int, scan: int
) -> None:
    file = tmp_path_factory.mktemp("lines") / "lines"
    file.write_bytes(b"\n".join([b"{}", *lines]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MIN_BYTES", part_bytes)
        patch.setattr(files, "_SCAN_BYTES", scan)
        found, expected = list(file_parts(file)), number_of_parts(file)

    def rows(*parts: FilePart) -> list[tuple[int, str]]:
        return [(line, str(row)) for part in parts for line, row in read_rows(file, part)]

    assert rows(*found) == rows(WHOLE_FILE)
    assert [part.number for part in found] == list(range(len(found)))
    assert 1 <= len(found) <= expected


def test_examples_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", mixed_rows(120))
    whole, columns, _ = opened(path, tmp_path / "whole", part_bytes=WHOLE)
    shown: list[tuple[str, int, int]] = []

    def progress(items, *, total, title):  # type: ignore[no-untyped-def]
        passed = list(items)
        shown.append((title, len(passed), total))
        return iter(passed)

    for workers in (1, 2):
        folder = tmp_path / f"of {workers}"
        table, found, _ = opened(path, folder, part_bytes=2000, workers=workers, progress=progress)
        assert table.to_dict() == whole.to_dict()
        assert found == columns
        assert sorted(file.suffix for file in folder.iterdir()) == [".arrow", ".json"]
    assert arrow_file(tmp_path / "of 1") == arrow_file(tmp_path / "of 2")
    assert shown == [("tokenising a.jsonl", 6, 6)] * 2
    assert columns == FileColumns(
        rows=120,
        found={"messages": 40, "label": 40, "id": 40, "prompt": 80, "response": 80, "preference": 80},
        unused={"id": 40},
        labels={"label": {"true": [20, 1], "false": [20, 4]}, "preference": {"rejected": [40, 2], "chosen": [40, 3]}},
        texts=80,
    )


def test_pairs_tokenised_in_parts(tmp_path: Path) -> None:
    """Pairs and their lines are equal, whether their file is read whole or in parts."""
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": f"p{n}", "chosen": "y", "rejected": "n"} for n in range(50)])
    whole, *_ = opened(path, tmp_path / "whole", part_bytes=WHOLE, kind=DPO_EXAMPLES)
    table, *_ = opened(path, tmp_path / "parts", part_bytes=300, kind=DPO_EXAMPLES)
    assert table.to_dict() == whole.to_dict()
    assert table["line"][-1] == 50


def test_broken_rows_of_all_parts_are_counted(tmp_path: Path) -> None:
    rows = mixed_rows(90)
    for number in range(5, 90, 7):
        rows[number] = {"prompt": "p", "response": "r", "label": True, "weight": -number if number < 70 else -5}
    rows[80] = {"prompt": "", "response": "r", "label": True}  # found when it is tokenised
    path = write_rows(tmp_path / "a.jsonl", rows)
    whole, columns, message = opened(path, tmp_path / "whole", part_bytes=WHOLE)
    table, found, message_of_parts = opened(path, tmp_path / "parts", part_bytes=700)
    assert whole is table is None
    assert message.startswith("14 broken rows, the first 10 faults:\n")
    assert (message_of_parts, found) == (message, columns)
    assert list((tmp_path / "parts").iterdir()) == []


def test_parts_tokenised_by_an_interrupted_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write_rows(tmp_path / "a.jsonl", mixed_rows(90)), tmp_path / "cache"
    tokenised: list[int] = []
    encode = RecordEncoder.encode

    def counting(self: RecordEncoder, records: list) -> list:
        if len(tokenised) == 3:
            raise KeyboardInterrupt
        tokenised.append(len(records))
        return encode(self, records)

    monkeypatch.setattr(RecordEncoder, "encode", counting)
    with pytest.raises(KeyboardInterrupt):
        opened(path, folder, part_bytes=1000)
    (kept,) = folder.iterdir()
    names = [f"00000{number}.{end}" for number in range(3) for end in ("arrow", "json")]
    assert sorted(file.name for file in kept.iterdir()) == names
    (kept / "000001.arrow").write_bytes(b"")  # as after a crash of the machine
    first, tokenised[:] = tokenised[:], [0] * 9
    table, columns, _ = opened(path, folder, part_bytes=1000)
    assert sum(tokenised) == 90 - first[0] - first[2]
    monkeypatch.setattr(RecordEncoder, "encode", encode)
    whole, whole_columns, _ = opened(path, tmp_path / "whole", part_bytes=WHOLE)
    assert table.to_dict() == whole.to_dict()
    assert columns == whole_columns
    assert sorted(file.suffix for file in folder.iterdir()) == [".arrow", ".json"]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", mixed_rows(30))

    def growing(items, *, total, title):  # type: ignore[no-untyped-def]
        yield from items
        with path.open("a") as file:
            file.write("\n")

    with raises(DataError, "a.jsonl", "start"):
        opened(path, tmp_path / "cache", part_bytes=500, progress=growing)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes.os, "sched_getaffinity", lambda _: set(range(6)))
    assert [number_of_processes(None, count) for count in (1, 3, 4, 100)] == [1, 1, 2, 6]
    assert [number_of_processes(3, count) for count in (1, 5, 100)] == [1, 2, 3]
    monkeypatch.setattr(worker_processes.os, "sched_getaffinity", lambda _: set(range(200)))
    assert number_of_processes(None, 100) == 16
    assert number_of_processes(64, 1000) == 64


def numbered(count: int) -> list[FilePart]:
    return [FilePart(number=number) for number in range(count)]


def test_parts_from_worker_processes_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import nothing from the working directory, which may be the folder of a model that somebody else made."""
    monkeypatch.chdir(tmp_path)
    for module in ("multiprocessing", "pickle", "signal"):  # what a new process imports first, or its resource tracker
        (tmp_path / f"{module}.py").write_text("open('imported', 'w')")
    found = list(map_parts(part_work.process_and_number, numbered(20), processes=2, doing="reading", setting="workers"))
    assert [number for _, number in found] == list(range(20))
    assert len({process for process, _ in found} - {os.getpid()}) == 2
    assert not (tmp_path / "imported").exists()
    assert "PYTHONSAFEPATH" not in os.environ  # of other programs that are started later


def test_a_process_that_is_killed_is_one_error() -> None:
    with pytest.raises(UserError) as error:
        list(
            map_parts(part_work.killed_at_two, numbered(9), processes=2, doing="tokenising rows.jsonl", setting="--workers")
        )
    assert str(error.value) == Message("2", "rows.jsonl", "--workers")


UNGUARDED = """
from nemo_kto.data.rows.row_files import FilePart
from nemo_kto.data.tokens.workers import map_parts
from tests.unit.data import part_work
print("started", flush=True)
parts = [FilePart(number=n) for n in range(9)]
list(map_parts(part_work.without_end, parts, processes=2, doing="reading", setting="workers"))
"""


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def is_running(process: int) -> bool:
    """Whether a process has not ended; one that its adoptive parent has not yet waited for has."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_worker_processes_do_not_run_the_main_program(ending: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNGUARDED)
    output = tmp_path / "output"
    with output.open("wb") as file:
        environment = {**os.environ, "PYTHONPATH": fork_server.search_path(REPOSITORY)}
        program = subprocess.Popen(
            [sys.executable, tmp_path / "program.py"],
            env=environment,
            stdout=file,
            stderr=file,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in the background
        )
    assert wait_for(lambda: len(output.read_text().split()) >= 3)
    workers = [int(word) for word in output.read_text().split()[1:3]]
    program.send_signal(ending)
    program.wait(20)
    assert wait_for(lambda: not any(map(is_running, workers)))
    lines = output.read_text().splitlines()
    assert lines[0] == "started"
    assert lines.count("started") == 1
    assert set(map(str, workers)) == set(lines[1:3])


def test_no_process_outlives_the_one_that_started_workers(tmp_path: Path) -> None:
    """Python's resource tracker, which is a child of its own, ends too."""
    script = """
    import multiprocessing
    from multiprocessing import resource_tracker
    from nemo_kto.data.tokens.workers import isolated_starts

    with isolated_starts():
        process = multiprocessing.get_context("spawn").Process(target=print)
        process.start()
    process.join()
    print(resource_tracker._resource_tracker._pid)
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert not Path("/proc", done.stdout.split()[-1]).exists()
