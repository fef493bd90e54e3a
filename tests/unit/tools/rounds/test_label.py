"""`nemo-kto label`: rows of a person, a function and a model that judges; undo, and files that a killed command left."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
from nemo_kto.errors import UserError
from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.tools.rounds import label_command as label
from nemo_kto.tools.rounds.answers import read_answers, text_of
from nemo_kto.tools.rounds.label_page import PageServer
from nemo_kto.tools.rounds.labelling import Labelling, pair_questions, single_questions
from tests.helpers.commands import environment
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import serving
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds.conftest import ANSWERS, full_disk, read, run_and_kill

AnswersFile = Callable[..., Path]
SCORES = """
import sys
def length(prompt, answer):
    return len(answer)

def short(prompt, answer):
    return len(answer) < 8

def brief(prompt, answer):
    return len(answer) < 40

class Silent(BaseException):
    def __str__(self):
        raise OSError
    __repr__ = __str__

def ends(prompt, answer):
    if answer == "Water.":
        sys.exit(0)
    raise BaseExceptionGroup("several", [KeyboardInterrupt()]) if answer == "Why?" else Silent()

def unshown(prompt, answer):
    return Silent()

def broken(prompt, answer):
    return None if answer == "Why?" else 1 / (len(answer) - 6)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"scores_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(SCORES)
    (tmp_path / "ends_at_import.py").write_text("import sys; sys.exit(0)")
    monkeypatch.setenv("SCORES", name)


def run(*words: object) -> None:
    label.main([os.path.expandvars(str(word)) for word in words])


def records(file: Path, *, as_pairs: bool) -> list[Any]:
    """What training reads of the file."""
    reader, broken = FileReader(fields=Fields(), broken=(errors := RowErrors())), errors
    found = list((reader.dpo_records if as_pairs else reader.kto_records)(file, FileColumns()))
    broken.raise_if_any()
    return found


def test_a_person_labels_on_the_page_by_default(
    answers_file: AnswersFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends the command with the labels so far; the same one goes on, also after a kill within a line."""
    out = tmp_path / "thumbs.jsonl"
    given: list[list[str]] = [["first", "undo", "skip", "first"], ["first", "second", "undo", "first", "quit"]]

    def serve(page: PageServer) -> None:
        for action in given.pop(0):
            if action == "quit":
                return
            page.act(page.state()["key"], action)
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", serve)
    words = [answers_file("Water.", "Mud \x1b[2J.", "Ice."), "--out", out, "--round", "2"]
    run(*words)
    assert [(row["source"]["line"], row["source"]["index"], row["label"]) for row in read(out)] == [(1, 1, True)]
    assert read(out)[0]["source"] == {"model": "m", "line": 1, "index": 1, "labeller": "person", "round": 2}
    with out.open("a") as file:
        file.write('{"prompt": [{"ro')  # as of a process that was killed while it wrote
    run(*words, "--page")
    assert [(row["source"]["index"], row["label"]) for row in read(out)] == [(1, True), (0, True), (2, True)]
    first, second = capsys.readouterr().out.split("Ctrl-C ends; every label is in the file at once.\n")[:2]
    assert first.startswith("open http://127.0.0.1:")
    assert f"{out}: 1 row: 1 good, 0 bad; 5 questions left, for which the same command asks again\n" in second
    assert records(out, as_pairs=False)[0].response == [{"role": "assistant", "content": "Mud \x1b[2J."}]


def test_pairs_are_shown_in_a_random_order_that_is_always_the_same(answers_file: AnswersFile, tmp_path: Path) -> None:
    answers = read_answers(answers_file(*ANSWERS, *map(str, range(60)), "same", "same"))
    questions = pair_questions(answers)
    assert [question.key for question in questions] == [question.key for question in pair_questions(answers)]
    assert len(questions) == 64, "equal answers are no pair"
    swapped = sum(question.answers[0].key > question.answers[1].key for question in questions)
    assert 20 < swapped < 44
    out, shown = tmp_path / "pairs.jsonl", pair_questions(read_answers(answers_file()))
    with open_rows(out, option="--out") as file:
        labelling = Labelling(questions=shown, file=file, about={})
        for verdict in (True, False):
            labelling.answer(verdict)
    found = records(out, as_pairs=True)
    assert [record.chosen[0]["content"] for record in found] == [shown[0].answers[0].text, shown[1].answers[1].text]
    assert sorted(read(out)[0]["source"]["index"]) == [0, 1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--score", "$SCORES.short"], [True, False, True, False] * 2),
        (["--score", "$SCORES.length", "--threshold", "8"], [False, True, False, True] * 2),
        (["--score", "$SCORES.length", "--pairs"], [(ANSWERS[1], ANSWERS[2])] * 2),
    ],
)
def test_scores(words: list[str], expected: list[Any], answers_file: AnswersFile, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run(answers_file(), "--out", out, *words)
    rows = read(out)
    assert [row.get("label", (row.get("chosen"), row.get("rejected"))) for row in rows] == expected
    assert rows[0]["source"]["labeller"] == os.path.expandvars(f"score {words[1]}")
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    run(answers_file(), "--out", out, *words)
    assert out.read_bytes() == whole
    assert len(records(out, as_pairs="--pairs" in words)) == len(expected)


def test_thoughts_stay_with_their_answers(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "2 + 2?"}]
    good = [{"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}]
    bad = "It must be five, I think, although I have not counted."
    answers = write_rows(
        tmp_path / "answers.jsonl",
        [{"prompt": prompt, "answer": each, "model": "m", "line": 1, "index": i} for i, each in enumerate((good, bad))],
    )
    singles, pairs = tmp_path / "singles.jsonl", tmp_path / "pairs.jsonl"
    for out, words in ((singles, []), (pairs, ["--pairs"])):
        for _ in range(2):  # the same command continues
            run(answers, "--out", out, "--score", "$SCORES.brief", *words)
    found = [(record.prompt, record.response, record.desirable) for record in records(singles, as_pairs=False)]
    other = [{"role": "assistant", "content": bad}]
    assert found == [(prompt, good, True), (prompt, other, False)]
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in records(pairs, as_pairs=True)] == [(prompt, good, other)]


def test_calls_of_earlier_turns_are_shown(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "lake"}}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"prompt": [*turns, {"role": "tool", "content": "water"}], "answer": "a", "model": "m", "line": 1, "index": 0}
    answers, rubric = write_rows(tmp_path / "answers.jsonl", [row]), tmp_path / "rubric.txt"
    rubric.write_text("Good answers are short.")
    with serving(lambda body: "good") as server:
        run(answers, "--out", tmp_path / "rows.jsonl", "--judge", server.url, "--rubric", rubric)
        shown = [server.requests[0]["messages"][1]["content"]]
    with open_rows(tmp_path / "page.jsonl", option="--out") as file:
        questions = single_questions(read_answers(answers))
        with PageServer(labelling=Labelling(questions=questions, file=file, about={})) as page:
            shown.append(str(page.state()["prompt"]))
    for text in shown:
        assert "look_up" in text
        assert "None" not in text


def test_a_killed_command_continues(answers_file: AnswersFile, tmp_path: Path) -> None:
    answers = answers_file(*(f"answer {number}" for number in range(10)))
    words, whole, killed = ["--score", "$SCORES.short"], tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    run(answers, "--out", whole, *words)
    run_and_kill(run, answers, "--out", killed, *words, writes=9)
    assert 0 < len(read(killed)) < 20
    run(answers, "--out", killed, *words)
    assert killed.read_bytes() == whole.read_bytes()


def test_a_judge(answers_file: AnswersFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rubric.txt").write_text("Good answers are short.")
    out = tmp_path / "thumbs.jsonl"
    # the template of some models opens the thoughts
    replies = {
        "Water.": "good or bad?</think>**Good**.",
        "Why?": "<think>good</think>bad",
        "No idea.": "It is good, or bad.",
    }

    def answer(body: dict[str, Any]) -> str:
        return next(
            (reply for text, reply in replies.items() if f"<answer>\n{text}\n" in body["messages"][1]["content"]), "good"
        )

    with serving(answer) as server:
        words = [answers_file(), "--out", out, "--judge", server.url, "--rubric", "rubric.txt"]
        run(*words)
        assert server.requests[0]["messages"][0] == {"role": "system", "content": "Good answers are short."}
        assert server.requests[0]["temperature"] == 0
        assert len(server.requests) == 8
        captured = capsys.readouterr()
        assert Message("2 questions", "answers.jsonl:4", "It is good, or bad.") == captured.err
        assert "2 questions left" in captured.out
        verdicts = {(row["response"], row["label"]) for row in read(out)}
        assert verdicts == {("Water.", True), ("Why?", False), (ANSWERS[1], True)}
        replies["No idea."] = "bad"
        run(*words)
        assert len(server.requests) == 10, "only the questions without a verdict"
        assert len(read(out)) == 8
        assert read(out)[0]["source"]["labeller"] == f"judge {server.models[0]}"
        server.answer = lambda body: "B"
        run(answers_file(), "--out", tmp_path / "pairs.jsonl", *words[3:], "--pairs")
        shown = pair_questions(read_answers(answers_file()))
        assert {row["chosen"] for row in read(tmp_path / "pairs.jsonl")} == {question.answers[1].text for question in shown}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--page", "--score", "a.b", "--judge", "x", "--threshold", "1"], ["--page and --score and --judge", "--rubric"]),
        (["--threshold", "1", "--model", "m"], ["--threshold", "--score", "--model", "--judge"]),
        (["--score", "a.b", "--pairs", "--threshold", "1"], ["--threshold", "--pairs", "leave it out"]),
        (["--score", "nowhere.f"], ["--score", "nowhere.f", "ModuleNotFoundError"]),
        (["--score", "os.name"], ["--score", "a function", "os.name"]),
        (["--score", "$SCORES.length"], ["--threshold", "numbers", "6"]),
        (["--score", "$SCORES.ends"], ["8 answers", "answers.jsonl:1", "SystemExit", "BaseExceptionGroup", "Silent"]),
        (["--score", "$SCORES.unshown"], ["8 answers", "a finite number or a bool", "a value of the type Silent"]),
        (["--score", "ends_at_import.f"], ["--score", "ends_at_import.f", "can be imported", "SystemExit: 0"]),
        (["--score", "$SCORES.broken"], ["4 answers", "answers.jsonl:1", "ZeroDivisionError", "answers.jsonl:3", "None"]),
        (["--judge", "http://x", "--rubric", "pipe"], ["--rubric", "pipe", "a named pipe", "correct the path"]),
        (["--judge", "http://x", "--rubric", "gone"], ["--rubric", "gone", "correct the path"]),
        (["--score", "$SCORES.short", "--out", "answers.jsonl"], ["--out", "labels of these answers", "answers.jsonl:1"]),
    ],
)
def test_mistakes(words: list[str], parts: list[str], answers_file: AnswersFile, tmp_path: Path) -> None:
    os.mkfifo("pipe")
    with raises(UserError, *parts):
        run(answers_file(), "--out", tmp_path / "rows.jsonl", *words)


def test_a_second_command_continues_or_names_what_differs(answers_file: AnswersFile, tmp_path: Path) -> None:
    out, scores = tmp_path / "rows.jsonl", ["--score", "$SCORES.length"]
    run(answers_file(), "--out", out, *scores, "--threshold", "8")
    whole = out.read_bytes()
    run(answers_file(), "--out", out, *scores, "--threshold", "8")
    with raises(UserError, "--out", "threshold 8.0 instead of 100.0", "rows.jsonl:1", "another --out"):
        run(answers_file(), "--out", out, *scores, "--threshold", "100")
    assert out.read_bytes() == whole
    pairs = tmp_path / "pairs.jsonl"
    for _ in range(2):
        run(answers_file(), "--out", pairs, *scores, "--pairs")
    assert len(read(pairs)) == 2


@pytest.mark.parametrize("content", ["my only note", '[{"chosen": "a"}]', '{"a": '])
def test_another_file_is_not_touched(content: str, answers_file: AnswersFile, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(content)
    with raises(UserError, "notes.txt:1", "object", "another file"):
        run(answers_file(), "--out", out, "--score", "$SCORES.short")
    assert out.read_text() == content


def test_answers_of_two_files_in_one_are_refused(answers_file: AnswersFile, tmp_path: Path) -> None:
    file = answers_file("a", "b")
    file.write_text(file.read_text() * 2)
    with raises(UserError, "answers.jsonl:5", "answers.jsonl:1", "line 1 and index 0", "one after the other"):
        read_answers(file)


def test_lines_that_are_no_answers(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text(
        '{"prompt": "p", "answer": 3, "model": "m", "line": 1, "index": 0}\n{"a": 1}\nx\n'
        '{"prompt": "p", "answer": [], "model": "m", "line": 1, "index": 0}\n' + "[" * 100_000
    )
    wrong = ["3 as answer", "None as prompt", "JSON", "[] as answer"]
    with raises(UserError, *wrong, *(f"answers.jsonl:{line}" for line in range(1, 6))):
        read_answers(tmp_path / "answers.jsonl")


@pytest.mark.parametrize(
    ("prompt", "answer", "got"),
    [
        ([1, 2], "a", "got 1"),
        ([["user", "?"]], "a", "got ['user', '?']"),
        ([{"content": "?"}], "a", "got {'content': '?'}"),
        ([{"role": 5, "content": "?"}], "a", "got {'role': 5,"),
        ([{"role": "user", "content": 5}], "a", "got 5"),
        ([], "a", "got []"),
        ("?", [{"role": "user", "content": "a"}], "['user']"),
        ("?", [{"role": "assistant", "content": {}}], "got {}"),
    ],
)
def test_rows_of_messages_that_are_none(prompt: Any, answer: Any, got: str, tmp_path: Path) -> None:
    """They are refused before a question is shown on a page or to a judge."""
    row = {"prompt": prompt, "answer": answer, "model": "m", "line": 1, "index": 0}
    answers = write_rows(tmp_path / "answers.jsonl", [row])
    for words in ([], ["--score", "$SCORES.short"], ["--pairs", "--page"]):
        with raises(UserError, f"{answers}:1: ", got):
            run(answers, "--out", tmp_path / "rows.jsonl", *words)
    assert not (tmp_path / "rows.jsonl").exists()


def test_calls_that_are_none_are_shown_as_they_are() -> None:
    calls: list[Any] = [{"role": "assistant", "content": "", "tool_calls": 5}]
    assert text_of(calls) == "<tool_call>\n5\n</tool_call>"
    assert text_of([{**calls[0], "tool_calls": [None, {"name": "f"}]}]).count("<tool_call>") == 2


def test_the_host_of_another_writer_does_not_control_the_terminal(answers_file: AnswersFile, tmp_path: Path) -> None:
    out, owner = tmp_path / "rows.jsonl", tmp_path / ".rows.jsonl.lock.owner"
    other = {"host": "\x1b]0;owned\x07", "pid": 1, "machine": "other", "job": None, "since": 0}
    owner.write_text(json.dumps(other))
    program = "from nemo_kto.utils import locks; locks.GONE_SECONDS = 1.0; from nemo_kto.cli.main import main; main()"
    words = ["label", answers_file(), "--out", out, "--score", os.path.expandvars("$SCORES.short")]
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, len(read(out))) == (0, 8), done.stderr
    assert "\x1b" not in done.stderr
    assert Message("waiting for a heartbeat", "\\x1b]0;owned\\x07") == done.stderr
    assert Message("warning:", "sends no heartbeat", "\\x1b]0;owned\\x07") == done.stderr


def fetch(address: str, path: str, body: object = None) -> dict[str, Any]:
    url = address.replace("/?", f"/{path}?")
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data)) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found


@contextlib.contextmanager
def page(answers: Path, out: Path) -> Iterator[PageServer]:
    questions = single_questions(read_answers(answers))
    with (
        open_rows(out, option="--out") as file,
        PageServer(labelling=Labelling(questions=questions, file=file, about={})) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def test_a_full_disk_is_shown_on_the_page_which_goes_on(answers_file: AnswersFile, tmp_path: Path) -> None:
    out = tmp_path / "thumbs.jsonl"
    with page(answers_file(), out) as server:
        for number in range(8):
            key = fetch(server.address, "state")["key"]
            if number % 3 == 1:
                with full_disk(out, room=number), pytest.raises(urllib.error.HTTPError, match="507") as refused:
                    fetch(server.address, "verdict", {"key": key, "action": "first"})
                assert Message(str(out), "cannot be written", "make room") == refused.value.read().decode()
                assert fetch(server.address, "state")["key"] == key
            fetch(server.address, "verdict", {"key": key, "action": "first"})
        os.truncate(out, 10)
        with pytest.raises(urllib.error.HTTPError, match="507") as refused:
            fetch(server.address, "verdict", {"key": None, "action": "undo"})
        assert Message(str(out), "10 bytes", "start the command again") == refused.value.read().decode()
        assert fetch(server.address, "state")["position"] == 8
        assert out.stat().st_size == 10


def test_rubbish_and_browsers_that_close_early_are_passed_over(
    answers_file: AnswersFile, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = [b"GET http://[ HTTP/1.1\r\n\r\n", b"POST //[/verdict HTTP/1.1\r\n\r\n", b"\0\xff\r\n\r\n", b"GET", b""]
    with page(answers_file(), tmp_path / "thumbs.jsonl") as server:
        query = server.address.split("/?")[1].encode()
        requests.append(b"GET /?" + query + b" HTTP/1.1\r\n\r\n")
        requests.append(b"POST /verdict?" + query + b" HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
        for request in requests * 4:
            with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                connection.sendall(request)
        with urllib.request.urlopen(server.address) as reply:
            headers = dict(reply.headers)
        assert fetch(server.address, "state")["position"] == 0
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert capfd.readouterr() == ("", "")


def test_the_page_over_http(answers_file: AnswersFile, tmp_path: Path) -> None:
    questions, out = single_questions(read_answers(answers_file())), tmp_path / "thumbs.jsonl"
    with (
        open_rows(out, option="--out") as file,
        PageServer(labelling=Labelling(questions=questions, file=file, about={})) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        for path in ("", "state", "verdict"):
            for address in (server.address.replace("token=", "token=x"), server.address.split("?")[0] + "?"):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    fetch(address, path, {"key": questions[0].key, "action": "first"} if path == "verdict" else None)
        assert read(out) == []
        state = fetch(server.address, "state")
        assert (state["position"], state["total"], state["answers"]) == (0, 8, ["Water."])
        for _ in range(2):  # the second click is about a question that has its label
            state = fetch(server.address, "verdict", {"key": questions[0].key, "action": "first"})
        assert (state["position"], state["key"], len(read(out))) == (1, questions[1].key, 1)
        fetch(server.address, "verdict", {"key": questions[1].key, "action": "second"})
        assert fetch(server.address, "verdict", {"key": questions[2].key, "action": "undo"})["position"] == 1
        assert [row["label"] for row in read(out)] == [True]
        rubbish: list[object] = [0, [], {"action": []}, {"action": {}}, {"key": questions[1].key, "action": []}]
        for body in rubbish:
            with contextlib.suppress(urllib.error.HTTPError):
                fetch(server.address, "verdict", body)
            assert len(read(out)) == 1
        with pytest.raises(urllib.error.HTTPError, match="400"):
            fetch(server.address, "verdict", b"[" * 60_000)
        assert fetch(server.address, "verdict", {"action": "quit"}) == {"ended": True}
        thread.join(10)
        assert not thread.is_alive()
