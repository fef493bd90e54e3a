"""`nemo-kto label`: rows of a person, a function and a model that judges; undo, and files that a killed command left."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
from nemo_kto.errors import UserError
from nemo_kto.telemetry.console import set_up_logging
from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.tools.rounds.answers import read_answers, text_of
from nemo_kto.tools.rounds.label_page import PageServer
from nemo_kto.tools.rounds.labelling import BOTH_BAD, TIE, Labelling, Question, pair_questions, single_questions
from nemo_kto.utils import locks
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import serving
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds.conftest import ANSWERS, SCORES, answers, full_disk, read, run

OUT = Path("out.jsonl")
BY_JUDGE = ["--rubric", "rubric.txt", "--judge"]
RUBRIC = f"{zlib.crc32(b'Good answers are short.'):08x}"


def records(*, as_pairs: bool) -> list[Any]:
    """What training reads of the rows."""
    reader = FileReader(fields=Fields(), broken=(errors := RowErrors()))
    found = list((reader.dpo_records if as_pairs else reader.kto_records)(OUT, FileColumns()))
    errors.raise_if_any()
    return found


def verdicts() -> list[object]:
    """Labels, or chosen and rejected answers, of the rows."""
    return [row.get("label", (row.get("chosen"), row.get("rejected"))) for row in read(OUT)]


def replied(body: dict[str, Any]) -> str:
    """The reply of a judge; the template of some models opens the thoughts."""
    replies = {
        "Water.": "good or bad?</think>**Good**.",
        "Why?": "<think>good</think>bad",
        "No idea.": "It is good, or bad.",
    }
    asked = body["messages"][1]["content"]
    return next((reply for text, reply in replies.items() if f"<answer>\n{text}\n" in asked), "good")


class Labelled(NamedTuple):
    """Options, the source of each row, the verdicts, and what is printed."""

    words: list[str]
    source: dict[str, object]
    verdicts: Sequence[object]
    out: str
    err: str = ""


NEXT = "next: nemo-kto kto MODEL out.jsonl\n"
LABELLED = {
    "bools": Labelled(
        ["--score", f"{SCORES}.short"], {"labeller": f"score {SCORES}.short"}, [True, False, True, False] * 2,
        f"out.jsonl: 8 rows: 4 good, 4 bad\n{NEXT}",
    ),
    "numbers": Labelled(
        ["--score", f"{SCORES}.length", "--threshold", "8", "--round", "2"],
        {"labeller": f"score {SCORES}.length", "round": 2, "threshold": 8.0}, [False, True, False, True] * 2,
        f"out.jsonl: 8 rows: 4 good, 4 bad\n{NEXT}",
    ),
    "best and worst": Labelled(
        ["--score", f"{SCORES}.length", "--pairs"], {"labeller": f"score {SCORES}.length"}, [(ANSWERS[1], ANSWERS[2])] * 2,
        "out.jsonl: 2 rows: 2 preferences\nnext: nemo-kto dpo MODEL out.jsonl\n",
    ),
    "judge": Labelled(
        BY_JUDGE, {"labeller": "judge served", "rubric": RUBRIC}, [True, True, False] * 2,
        f"out.jsonl: 6 rows: 4 good, 2 bad; 2 questions left, for which the same command asks again\n{NEXT}",
        "nemo-kto label: 2 questions without a verdict, the first at answers.jsonl:4: no clear verdict in "
        "'It is good, or bad.'; they are left out\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
def test_labels_are_rows_for_training(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command continues after a kill within a line, and asks only about questions without a verdict."""
    words, source, expected, out, err = LABELLED[name]
    file = answers("answers.jsonl", ANSWERS * 2, each=4)
    with serving(replied) as server:
        given = [file, *words, *([server.url] if words == BY_JUDGE else []), "--concurrency", "1"]
        run("label", *given)
        assert verdicts() == expected
        assert {name: value for name, value in read(OUT)[0]["source"].items() if name not in ("line", "index", "model")} == (
            source
        )
        assert len(records(as_pairs="--pairs" in words)) == len(expected)
        captured = capsys.readouterr()
        assert (captured.out, captured.err.splitlines(keepends=True)[-1:]) == (out, [err] if err else [])
        asked, whole = len(server.requests), OUT.read_bytes()
        OUT.write_bytes(whole[:-20])
        run("label", *given)
        assert OUT.read_bytes() == whole
        if words == BY_JUDGE:
            body = server.requests[0]
            assert body["messages"][0] == {"role": "system", "content": "Good answers are short."}
            assert (asked, len(server.requests), body["temperature"]) == (8, 8 + 3, 0)


def test_a_person_labels_on_the_page_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends the command with the labels so far; the same one goes on, also after a kill within a line."""
    given: list[list[str]] = [["first", "undo", "skip", "first"], ["first", "second", "undo", "first", "quit"]]

    def serve(page: PageServer) -> None:
        for action in given.pop(0):
            if action == "quit":
                return
            page.act(page.state()["key"], action)
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", serve)
    words = [answers("answers.jsonl", ["Water.", "Mud \x1b[2J.", "Ice."] * 2, each=3), "--round", "2"]
    run("label", *words)
    source = {"model": "model of answers.jsonl", "line": 1, "index": 1, "labeller": "person", "round": 2}
    row = {"prompt": "Question 1?", "response": "Mud \x1b[2J.", "label": True, "source": source}
    assert read(OUT) == [row]
    with OUT.open("a") as file:
        file.write('{"prompt": "Q')  # as of a process that was killed while it wrote
    run("label", *words, "--page")
    assert [(row["source"]["index"], row["label"]) for row in read(OUT)] == [(1, True), (0, True), (2, True)]
    assert records(as_pairs=False)[0].response == "Mud \x1b[2J."
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("open http://127.0.0.1:")
    assert second == "Ctrl-C ends; every label is in the file at once."
    assert rest[0] == "out.jsonl: 1 row: 1 good, 0 bad; 5 questions left, for which the same command asks again"
    assert rest[1] == NEXT.strip()


def test_pairs_are_shown_in_a_random_order_that_is_always_the_same() -> None:
    """Equal answers are no pair."""
    texts = [*ANSWERS, *map(str, range(60)), "same", "same"]
    questions = [pair_questions(read_answers(Path(answers("answers.jsonl", texts * 2, each=66)))) for _ in range(2)]
    assert questions[0] == questions[1]
    assert len(questions[0]) == 64
    assert 20 < sum(question.answers[0].key > question.answers[1].key for question in questions[0]) < 44
    with open_rows(OUT, option="--out") as file:
        labelling = Labelling(questions=questions[0], file=file, about={})
        for verdict in (True, False):
            labelling.answer(verdict)
    first, second = (question.answers for question in questions[0][:2])
    assert [record.chosen for record in records(as_pairs=True)] == [first[0].text, second[1].text]
    assert sorted(read(OUT)[0]["source"]["index"]) == [0, 1]


def test_ties_and_cut_answers_of_pairs() -> None:
    """Training leaves ties out, and the same command continues after them."""
    file = Path(answers("answers.jsonl", list("abcdefgh"), finish="length"))
    for first, verdict in enumerate([True, TIE, BOTH_BAD, None]):
        with open_rows(OUT, option="--out") as opened:
            labelling = Labelling(questions=pair_questions(read_answers(file)), file=opened, about={})
            assert labelling.position == first
            labelling.answer(verdict)
    assert labelling.tally == "1 preference, 1 tie, 1 both bad"
    pair, *ties = read(OUT)
    assert [(row["winner"], {row["response_a"], row["response_b"]}) for row in ties] == [
        ("tie", {*"cd"}),
        ("both_bad", {*"ef"}),
    ]
    for as_pairs in (True, False):
        assert len(records(as_pairs=as_pairs)) == (1 if as_pairs else 2)
    (last,) = [each for each in pair_questions(read_answers(file)) if each.key.startswith("4")]
    assert last.row(True)["source"]["cut"] == [answer.text == "h" for answer in last.answers]  # type: ignore[index]
    assert Question(answers=last.answers[:1]).row(True)["source"].get("cut", False) is last.answers[0].is_cut  # type: ignore
    assert "cut" not in pair["source"]


def test_calls_of_earlier_turns_are_shown_to_judges_and_on_the_page() -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "lake"}}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"prompt": [*turns, {"role": "tool", "content": "water"}], "answer": "a", "model": "m", "line": 1, "index": 0}
    file = write_rows(Path("answers.jsonl"), [row])
    with serving(lambda body: "good") as server:
        run("label", file, *BY_JUDGE, server.url)
        shown = [server.requests[0]["messages"][1]["content"]]
    with page(file, Path("page.jsonl")) as server_of_page:
        shown.append(str(server_of_page.state()["prompt"]))
    for text in shown:
        assert "look_up" in text
        assert "None" not in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--page --score a.b --judge x --threshold 1", ["--page and --score and --judge", "--rubric"]),
        ("--score a.b --host x --port 1", ["--host", "with the page", "got x with --score", "--port", "leave it out"]),
        ("--port 70000", ["--port", "at most 65,535", "70000"]),
        ("--host 192.0.2.1", ["--host and --port", "a free address of this machine", "192.0.2.1", "leave them out"]),
        ("--host a..b", ["--host and --port", "a..b", "leave them out"]),
        ("--threshold 1 --model m", ["--threshold", "--score", "--model", "--judge"]),
        ("--page --leave-out seed", ["--leave-out", "--judge", "seed", "leave it out"]),
        ("--score a.b --pairs --threshold 1", ["--threshold", "--pairs", "leave it out"]),
        ("--score nowhere.f", ["--score", "nowhere.f", "ModuleNotFoundError"]),
        ("--score os.name", ["--score", "a function", "os.name"]),
        (f"--score {SCORES}.length", ["--threshold", "numbers", "6"]),
        (f"--score {SCORES}.ends", ["8 answers", "answers.jsonl:1", "SystemExit", "BaseExceptionGroup", "Silent"]),
        (f"--score {SCORES}.unshown", ["8 answers", "a finite number or a bool", "a value of the type Silent"]),
        ("--score ends_at_import.f", ["--score", "ends_at_import.f", "can be imported", "SystemExit: 0"]),
        (f"--score {SCORES}.broken", ["4 answers", "answers.jsonl:1", "ZeroDivisionError", "answers.jsonl:3", "None"]),
        ("--judge http://x --rubric pipe", ["--rubric", "pipe", "a named pipe", "correct the path"]),
        ("--judge http://x --rubric gone", ["--rubric", "gone", "correct the path"]),
        (f"--score {SCORES}.short --out answers.jsonl", ["--out", "labels of these answers", "answers.jsonl:1"]),
        (f"--score {SCORES}.short --out notes", ["notes:1", "object", "another file"]),
        (f"--score {SCORES}.short --out array", ["array:1", "object", "another file"]),
        (f"--score {SCORES}.short --out begun", ["begun:1", "object", "another file"]),
        (
            f"--score {SCORES}.length --threshold 100 --out earlier",
            ["--out", "threshold 8.0 instead of 100.0", "earlier:1", "another --out"],
        ),
    ],
)
def test_mistakes(words: str, parts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another file is left as it is."""
    monkeypatch.syspath_prepend(tmp_path)
    os.mkfifo("pipe")
    file = answers("answers.jsonl", ANSWERS * 2, each=4)
    run("label", file, "--score", f"{SCORES}.length", "--threshold", "8", "--out", "earlier")
    for name, text in {"notes": "my only note", "array": '[{"chosen": "a"}]', "begun": '{"a": '}.items():
        Path(name).write_text(text)
    Path("ends_at_import.py").write_text("import sys; sys.exit(0)")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with raises(UserError, *parts):
        run("label", file, *words.split())
    assert {path: path.read_bytes() for path in before} == before
    assert not OUT.exists() or read(OUT) == []


ANSWER: dict[str, Any] = {"prompt": "p", "answer": "a", "model": "m", "line": 1, "index": 0}


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            [ANSWER, {**ANSWER, "index": 1}] * 2,
            ["answers.jsonl:3", "as in answers.jsonl:1", "line 1 and index 0", "one after the other"],
        ),
        ([{**ANSWER, "answer": 3}], ["answers.jsonl:1: ", "3 as answer"]),
        ([{**ANSWER, "answer": []}, {"a": 1}], ["answers.jsonl:1: ", "[] as answer", "answers.jsonl:2: ", "None as prompt"]),
        (["x", "[" * 100_000], ["answers.jsonl:1: ", "JSON", "answers.jsonl:2: "]),
        ([{**ANSWER, "prompt": [1, 2]}], ["answers.jsonl:1: ", "got 1"]),
        ([{**ANSWER, "prompt": [["user", "?"]]}], ["answers.jsonl:1: ", "got ['user', '?']"]),
        ([{**ANSWER, "prompt": [{"content": "?"}]}], ["answers.jsonl:1: ", "got {'content': '?'}"]),
        ([{**ANSWER, "prompt": [{"role": 5, "content": "?"}]}], ["answers.jsonl:1: ", "got {'role': 5,"]),
        ([{**ANSWER, "prompt": [{"role": "user", "content": 5}]}], ["answers.jsonl:1: ", "got 5"]),
        ([{**ANSWER, "prompt": []}], ["answers.jsonl:1: ", "got []"]),
        ([{**ANSWER, "answer": [{"role": "user", "content": "a"}]}], ["answers.jsonl:1: ", "['user']"]),
        ([{**ANSWER, "answer": [{"role": "assistant", "content": {}}]}], ["answers.jsonl:1: ", "got {}"]),
    ],
)
def test_lines_that_are_no_answers(lines: list[Any], parts: list[str]) -> None:
    """They are refused before a question is shown on a page or to a judge."""
    Path("answers.jsonl").write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    for words in ([], ["--score", f"{SCORES}.short"], ["--pairs"]):
        with raises(UserError, *parts):
            run("label", "answers.jsonl", *words)
    assert not OUT.exists()


def test_calls_that_are_none_are_shown_as_they_are() -> None:
    calls: list[Any] = [{"role": "assistant", "content": "", "tool_calls": 5}]
    assert text_of(calls) == "<tool_call>\n5\n</tool_call>"
    assert text_of([{**calls[0], "tool_calls": [None, {"name": "f"}]}]).count("<tool_call>") == 2


def test_the_host_of_another_writer_does_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "GONE_SECONDS", 0.2)
    set_up_logging(rank=0)
    logging.getLogger("nemo_kto").setLevel(logging.INFO)
    other = {"host": "\x1b]0;owned\x07", "pid": 1, "machine": "other", "job": None, "since": 0}
    Path(".out.jsonl.lock.owner").write_text(json.dumps(other))
    run("label", answers("answers.jsonl", ANSWERS), "--score", f"{SCORES}.short")
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert Message("waiting for a heartbeat", "\\x1b]0;owned\\x07") == printed
    assert Message("sends no heartbeat", "\\x1b]0;owned\\x07") == printed


def fetch(page: PageServer, path: str, body: object = None, *, token: str = "?token=") -> dict[str, Any]:
    """The reply of a page to a request."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    url = page.address.replace("/?", f"/{path}?").replace("?token=", token)
    with urllib.request.urlopen(urllib.request.Request(url, data=data)) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found


@contextlib.contextmanager
def page(file: str | Path, out: Path = OUT) -> Iterator[PageServer]:
    """The page about the answers of a file."""
    questions = single_questions(read_answers(Path(file)))
    with (
        open_rows(out, option="--out") as opened,
        PageServer(labelling=Labelling(questions=questions, file=opened, about={})) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="page")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
            assert not thread.is_alive()


def refused(status: int, page: PageServer, path: str, body: object = None, *, token: str = "?token=") -> str:
    """The text of a reply with an error status."""
    with pytest.raises(urllib.error.HTTPError, match=str(status)) as error:
        fetch(page, path, body, token=token)
    return error.value.read().decode()


def test_the_page_over_http() -> None:
    with page(answers("answers.jsonl", ANSWERS)) as server:
        state = fetch(server, "state")
        assert (state["position"], state["total"], state["answers"]) == (0, 4, [{"text": "Water.", "cut": False}])
        first = state["key"]
        for _ in range(2):  # the second click is about a question that has its label
            state = fetch(server, "verdict", {"key": first, "action": "first"})
        assert (state["position"], state["tally"], len(read(OUT))) == (1, "1 good, 0 bad", 1)
        assert fetch(server, "verdict", {"key": state["key"], "action": "tie"})["position"] == 1, "only for pairs"
        state = fetch(server, "verdict", {"key": state["key"], "action": "second"})
        assert fetch(server, "verdict", {"key": state["key"], "action": "undo"})["position"] == 1
        assert [row["label"] for row in read(OUT)] == [True]
        (serving_page,) = (thread for thread in threading.enumerate() if thread.name == "page")
        assert fetch(server, "verdict", {"action": "quit"}) == {"ended": True}
        serving_page.join(10)
        assert not serving_page.is_alive(), "the command ends"


def test_a_page_for_other_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its address has the token as well, and a warning says who can read it; a port in use is an error."""
    served = list[PageServer]()
    monkeypatch.setattr(PageServer, "serve_forever", lambda page: served.append(page))
    file = answers("answers.jsonl", ANSWERS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with raises(UserError, "--host and --port", f"127.0.0.1 and {port}", "in use", "leave them out"):
            run("label", file, "--port", port)
    run("label", file, "--port", port)
    assert capsys.readouterr().err == ""
    run("label", file, "--port", port, "--host", "0.0.0.0")
    first, second = served
    assert first.address.startswith(f"http://127.0.0.1:{port}/?token=")
    assert second.address.startswith(f"http://{socket.gethostname()}:{port}/?token=")
    assert len(second.address.partition("token=")[2]) == 22
    assert Message("not encrypted", "has its address can label", "ssh -L") == capsys.readouterr().err


@pytest.mark.parametrize("path", ["", "state", "verdict"])
@pytest.mark.parametrize("token", ["?token=x", "?"])
def test_the_page_without_its_token(path: str, token: str) -> None:
    with page(answers("answers.jsonl", ANSWERS)) as server:
        body = {"key": server.state()["key"], "action": "first"} if path == "verdict" else None
        refused(403, server, path, body, token=token)
        assert read(OUT) == []


@pytest.mark.parametrize("body", [0, [], {"action": []}, {"action": {}}, {"key": "1:0", "action": []}, b"[" * 60_000, b"{"])
def test_verdicts_that_are_none(body: object) -> None:
    with page(answers("answers.jsonl", ANSWERS)) as server:
        with contextlib.suppress(urllib.error.HTTPError) if not isinstance(body, bytes) else contextlib.nullcontext():
            refused(400, server, "verdict", body) if isinstance(body, bytes) else fetch(server, "verdict", body)
        assert read(OUT) == []
        assert fetch(server, "state")["position"] == 0


def test_a_full_disk_is_shown_on_the_page_which_goes_on() -> None:
    with page(answers("answers.jsonl", ANSWERS)) as server:
        for number in range(4):
            verdict = {"key": fetch(server, "state")["key"], "action": "first"}
            if number % 3 == 1:
                with full_disk(OUT, room=number):
                    assert Message(str(OUT), "cannot be written", "make room") == refused(507, server, "verdict", verdict)
                assert fetch(server, "state")["key"] == verdict["key"]
            fetch(server, "verdict", verdict)
        os.truncate(OUT, 10)
        text = refused(507, server, "verdict", {"key": None, "action": "undo"})
        assert Message(str(OUT), "10 bytes", "start the command again") == text
        assert fetch(server, "state")["position"] == 4
        assert OUT.stat().st_size == 10


def test_rubbish_and_browsers_that_close_early_are_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    requests = [b"GET http://[ HTTP/1.1\r\n\r\n", b"POST //[/verdict HTTP/1.1\r\n\r\n", b"\0\xff\r\n\r\n", b"GET", b""]
    with page(answers("answers.jsonl", ANSWERS)) as server:
        query = server.address.split("/?")[1].encode()
        requests.append(b"GET /?" + query + b" HTTP/1.1\r\n\r\n")
        requests.append(b"POST /verdict?" + query + b" HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
        for request in requests * 4:
            with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                connection.sendall(request)
        with urllib.request.urlopen(server.address) as reply:
            headers = dict(reply.headers)
        assert fetch(server, "state")["position"] == 0
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert capfd.readouterr() == ("", "")
