"""Files of rows on full disks, under several names, with long lines, and after kills: no row is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.tools.chat import session
from nemo_kto.tools.chat.session import Collector
from nemo_kto.tools.inference import row_output as rows
from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.utils import files, locks
from tests.helpers.commands import environment
from tests.helpers.messages import raises
from tests.helpers.openai_server import serving
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds.conftest import SCORES, answers, full_disk, read, run


def row(number: int) -> dict[str, object]:
    return {"prompt": f"question {number}", "answer": "é" * number}


@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_row_that_finds_no_room_is_neither_lost_nor_doubled(room: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for first in (0, 4):  # the second time by another command
        with open_rows(file, option="--out") as opened:
            opened.append(row(first))
            with full_disk(file, room=room):
                for _ in range(2):
                    with raises(UserError, str(file), "cannot be written", "too large", "make room"):
                        opened.append(row(first + 1), row(first + 2))
            assert read(file) == opened.rows
            opened.append(row(first + 1), row(first + 2))
            opened.append(row(first + 3))
            opened.remove_last()
            opened.append(row(first + 3))
        assert read(file) == [row(number) for number in range(first + 4)]


@pytest.mark.parametrize("content", [b'{"prompt": 1}', b'{"prompt": 1}\n{"prompt": [{"role', b'{"prompt": 1}\n{'])
def test_the_end_of_an_editor_or_of_a_killed_command(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with open_rows(file, option="--out") as opened:
        opened.append(row(2))
    assert read(file) == [{"prompt": 1}, row(2)]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{"prompt": 1}\n{"prompt": "' + b"x" * 100, ["rows.jsonl:2", "more than 64 bytes", "remove the line"]),
        (b'{"prompt": 1}\n{"prompt": "' + b"x" * 100 + b'"}\n{"prompt": 3}\n', ["rows.jsonl:2", "more than 64 bytes"]),
        (b'{"prompt": 1}\n' + b"[" * 60, ["rows.jsonl:2", "JSON object"]),
        (b'{"prompt": 1}\n[2]\n', ["rows.jsonl:2", "JSON object", "no object"]),
    ],
)
def test_lines_that_are_no_rows_are_kept(
    content: bytes, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 64)
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 64)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with raises(UserError, *parts, "another file"), open_rows(file, option="--out"):
        pass
    assert file.read_bytes() == content
    file.unlink()
    with open_rows(file, option="--out") as opened:
        opened.append({"prompt": "x" * 49})
        with raises(UserError, str(file), "at most 64 bytes", "65", "leave its prompt out"):
            opened.append({"prompt": "x" * 50})
        with raises(UserError, str(file), "UTF-8", "\\udcff"):
            opened.append({"prompt": "\udcff"})
    assert read(file) == [{"prompt": "x" * 49}]


def test_a_line_that_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"[" * 100_000)
    with raises(UserError, f"{file}:1", "recursion", "remove the line"), open_rows(file, option="--out"):
        pass


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, None])
def test_a_file_has_one_writer_under_all_its_names(
    link: Callable[[Path, Path], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_GRACE_SECONDS", 0.0)
    first, second = tmp_path / "rows.jsonl", tmp_path / "folder" / "rows.jsonl"
    first.write_text('{"prompt": 1}\n')
    second.parent.mkdir()
    if link is None:
        second = first
    else:
        link(second, first)
    holder = f"with open_rows(Path({str(first)!r}), option='x'): print(flush=True); sys.stdin.read()"
    program = f"import sys\nfrom pathlib import Path\nfrom nemo_kto.tools.inference.row_output import open_rows\n{holder}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.read(1)
        who = "another process" if link is Path.hardlink_to else str(other.pid)
        with raises(UserError, "--out", str(second), who, "wait"), open_rows(second, option="--out"):
            pass
        other.stdin.close()
    with open_rows(second, option="--out") as opened:
        opened.append(row(2))
    assert read(first) == [{"prompt": 1}, row(2)]
    assert second.is_symlink() == (link is Path.symlink_to)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/dev/null", "a character device"),
        (".", "a folder"),
        ("", "a folder"),
        ("/", "a folder"),
        ("pipe", "a named pipe"),
        ("file/rows.jsonl", "can be written"),
        ("loop", "can be written"),
    ],
)
def test_a_path_that_is_no_file(name: str, kind: str, tmp_path: Path) -> None:
    os.mkfifo("pipe")
    Path("file").touch()
    Path("loop").symlink_to("loop")
    with raises(UserError, "--out", "must be", f"got {Path(name)}", kind), open_rows(Path(name), option="--out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "pipe", "rubric.txt"]


OTHER_FILE = "got another file, or none"


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda file: os.truncate(file, 0), "0 bytes"),
        (lambda file: file.write_text("{}\n" * 9), "27 bytes"),
        (Path.unlink, OTHER_FILE),
        (lambda file: shutil.copy(file.rename(f"{file}~"), file), OTHER_FILE),  # as some editors do
    ],
)
def test_a_file_that_another_program_changes_is_left_as_it_is(
    change: Callable[[Path], object], got: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    with open_rows(file, option="--out") as opened:
        opened.append(row(1))
        file.touch()  # changes nothing
        opened.append(row(2), row(3))
        opened.remove_last()
        assert read(file) == opened.rows == [row(1), row(2)]
        change(file)
        content = file.read_bytes() if file.exists() else None
        for write in (opened.remove_last, lambda: opened.append(row(3))):
            with raises(UserError, str(file), "this command alone", got, "start the command again"):
                write()
    assert (file.read_bytes() if file.exists() else None) == content


def _collect() -> None:
    with open_rows(Path("out.jsonl"), option="--collect") as file:
        collect = Collector(file=file)
        for number in range(len(file.rows), 24):
            collect("m", f"question {number}", "é" * number)


def _key(row: dict[str, object]) -> object:
    """What a file has once: prompt and number of an answer, or of a label."""
    source = row.get("source", row)
    assert isinstance(source, dict)
    return (source.get("line"), source.get("index"), row["prompt"] if "line" not in source else None)


KILLS = [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.slow)]
EVEN = ["--score", f"{SCORES}.even"]
COMMANDS: dict[str, Callable[[str], None]] = {
    "sample": lambda url: run("sample", "prompts.jsonl", "-n", "3", "--endpoint", url, "--model", "m", "--concurrency", "2"),
    "label": lambda url: run("label", "answers.jsonl", *EVEN),
    "compare": lambda url: run("compare", "answers.jsonl", "others.jsonl", *EVEN),
    "chat": lambda url: _collect(),
}


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_again_and_again(
    command: str, kills: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before, within and after a write; a quarter as often, the disk is full; then the same command again."""
    monkeypatch.setattr(session, "read_key", lambda keys: "g")
    texts = ["a" * (line + index) for line in range(1, 9) for index in range(3)]
    answers("answers.jsonl", texts, each=3)
    answers("others.jsonl", [f"{text}!" for text in texts], each=3)
    write_rows(Path("prompts.jsonl"), [{"prompt": f"question {number}"} for number in range(8)])
    draw, out, ended, seen = random.Random(command), Path("out.jsonl"), 0, list[object]()
    with serving(lambda body: f"{body['messages'][-1]['content']} {body['seed']} é") as server:
        COMMANDS[command](server.url)
        whole = read(out)
        out.unlink()
        for _ in range(kills):
            status = _run_killed(lambda: COMMANDS[command](server.url), draw)
            assert status in (0, -signal.SIGKILL), capsys.readouterr()
            found = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]] if out.exists() else []
            keys = [_key(each) for each in found]
            assert keys[: len(seen)] == seen, "a row that was on disk stays where it is"
            assert len(set(keys)) == len(keys) <= 24
            seen = keys
            if status == 0 and len(keys) == 24:
                ended += 1
                out.unlink()
                seen = []
        COMMANDS[command](server.url)
    assert len(read(out)) == 24
    assert sorted(read(out), key=str) == sorted(whole, key=str), "the rows of a command that is not killed"
    assert ended > 0 or kills < 100


def _run_killed(run: Callable[[], None], draw: random.Random) -> int | None:
    """Run in another process, in which one of the next writes is cut: by a kill, or by a full disk; its status."""
    number, part, by_disk = draw.randrange(1, 9), draw.random(), draw.random() < 0.25

    def cut() -> None:
        write, count = os.write, iter(range(1, 1000))

        def cut_write(handle: int, content: memoryview) -> int:
            if (at := next(count)) < number or (by_disk and at > number + 1):
                return write(handle, content)
            if by_disk and at == number + 1:
                raise OSError(28, "No space left on device")
            written = write(handle, content[: int(len(content) * part)])
            if not by_disk:
                os.kill(os.getpid(), signal.SIGKILL)
            return written

        rows.os = type("os", (), {**vars(os), "write": staticmethod(cut_write)})  # type: ignore[assignment]
        with contextlib.suppress(UserError):
            run()

    process = multiprocessing.get_context("fork").Process(target=cut)
    process.start()
    process.join()
    return process.exitcode
