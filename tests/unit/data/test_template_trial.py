"""Endless or expensive chat templates: one error with file and row, without effect on valid templates."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nemo_kto.data.rows.reader import Fields, FileColumns, RowErrors
from nemo_kto.data.rows.records import DataError, KTORecord, LastRowError, RowError
from nemo_kto.data.tokens import chat_template as chat
from nemo_kto.data.tokens import rendering
from nemo_kto.data.tokens.cache import KTO_EXAMPLES, Tokeniser
from nemo_kto.data.tokens.chat_template import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.rendering import MARK, _render
from nemo_kto.data.tokens.truncation import Truncation
from tests.helpers.documented import REPOSITORY
from tests.helpers.messages import Message, assert_names
from tests.unit.data.tiny_data import CHATML, chatml_tokenizer

TIME = ("0.2", "CPU", "template", "strings")
MEMORY = ("1", "GiB", "template", "strings")
WITHOUT_END = {
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "a power that is computed when the template is compiled": ("{{ 9**(9**9) }}", TIME),
    "a power of what is in the row": ("{% set n = messages | length + 8 %}{{ n**(n**n) }}", TIME),
    "a long string": ("{{ 'x' * 10**11 }}", MEMORY),
    "a string that doubles": (
        "{% set s = namespace(t='x') %}{% for i in range(40) %}{% set s.t = s.t + s.t %}{% endfor %}",
        MEMORY,
    ),
    "a long output": ("{{ 'x' * 10**7 }}", ("10,000,000", "more", "template", "strings")),
}


def record(text: str, line: int) -> KTORecord:
    user, answer = {"role": "user", "content": text}, {"role": "assistant", "content": "yes"}
    return KTORecord(prompt=[user], response=[answer], desirable=True, line=line)


def rendered(text: str, template: str) -> EncodedExample | RowError:
    (example,) = RecordEncoder(tokenizer=chatml_tokenizer(template), bounded=True).encode([record(text, 1)])
    return example


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("nested ranges", "a long string") else pytest.mark.full)
        for kind in WITHOUT_END
    ],
)
def test_an_endless_template_is_one_error_with_file_and_row(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, names = WITHOUT_END[kind]
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.2 if names == TIME else 20)
    tokenizer = chatml_tokenizer("{% if 'now' in messages[0]['content'] %}" + template + "{% endif %}" + CHATML)
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("as in the tokenizer")
    encoder, rows = RecordEncoder(tokenizer=tokenizer), tmp_path / "rows.jsonl"
    cut, broken = Truncation(64, "keep_end", None), RowErrors()
    work = Tokeniser(kind=KTO_EXAMPLES, fields=Fields(), encoder=encoder, truncation=cut, private=True)
    records = [record("hi", 1), record("now", 2), record("now", 3)]
    with pytest.raises(DataError) as error:
        list(work.examples(records, rows, FileColumns(), broken))
    file = tmp_path / "chat_template.jinja"
    line = 1 if kind.endswith("compiled") else 2
    assert str(error.value) == Message(f"{rows}:{line}", f"{file}", *names)
    if line == 2:
        assert isinstance(encoder.encode([record("hi", 1)])[0], EncodedExample)  # nothing is left behind


def test_a_template_that_calls_itself_is_a_broken_row() -> None:
    """A recursion without end is an error of the row, and no crash."""
    template = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"
    (refused,) = RecordEncoder(tokenizer=chatml_tokenizer(template)).encode([record("hi", 1)])
    assert type(refused) is RowError
    assert_names(refused, "chat template", "maximum recursion depth exceeded")


def test_only_the_first_row_is_rendered_with_limits() -> None:
    template = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('of this row') }}{% endif %}"
    template += "{% if 'long' in messages[0]['content'] %}{{ 'x' * 10**7 }}{% endif %}" + CHATML
    encoder = RecordEncoder(tokenizer=chatml_tokenizer(template))
    strings = KTORecord(prompt="a", response="b", desirable=True, line=5)
    messages = [record(text, n) for n, text in enumerate(("hi", "bad", "long", "hi"), start=1)]
    first, broken, limit, after, plain = encoder.encode([*messages, strings])
    assert isinstance(first, EncodedExample)
    assert type(broken) is RowError
    assert "of this row" in str(broken)
    assert type(limit) is LastRowError
    assert str(limit) == Message("10,000,000", "more", "template", "strings")
    assert after is limit
    assert isinstance(plain, EncodedExample)


def test_a_template_is_tried_once_and_only_on_rows_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[str] = []

    def tried(template: str, messages: list[dict[str, str]], variables: dict[str, str], **how: bool) -> str:
        trials.append(messages[0]["content"])
        return _render(template, messages, {**variables, **how})

    monkeypatch.setattr(chat, "render_bounded", tried)
    monkeypatch.setattr(chat, "_tried_templates", set())
    encoder = RecordEncoder(tokenizer=chatml_tokenizer())
    encoder.encode([KTORecord(prompt="a", response="b", desirable=True, line=1)])
    assert not trials
    encoder.encode([record(f"{n}", n) for n in range(200)])
    encoder.encode([record("more", 1)])
    assert {text for text in trials if MARK not in text} == {f"{n}" for n in range(100)}


def test_a_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> bytes:
        assert rendering.renderer._started is not None
        rendering.renderer._started[0].kill()
        raise EOFError

    monkeypatch.setattr(Connection, "recv_bytes", ended)
    assert str(rendered("hi", CHATML)) == Message("chat template", "-9", "template", "strings")


def test_probes_of_rows_have_the_limits_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.2)
    endless, _ = WITHOUT_END["nested ranges"]
    template = "{% if '" + MARK + "x0x' in messages[0]['content'] %}" + endless + "{% endif %}" + CHATML
    assert str(rendered("hi", template)) == Message("chat template", *TIME)


def test_an_interrupted_parent_kills_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    rendering.renderer.close()
    others = set(multiprocessing.active_children())  # ranks of other tests in this process
    monkeypatch.setattr(Connection, "recv_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rendered("hi", CHATML)
    assert set(multiprocessing.active_children()) <= others


def test_signals_to_the_job_do_not_end_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that renders templates ignores the signals that a scheduler sends to all processes."""
    receive, received = Connection.recv_bytes, list[bytes]()
    rendering.renderer.close()
    others = set(multiprocessing.active_children())  # ranks of other tests in this process

    def signalled(self: Connection, limit: int) -> bytes:
        received.append(receive(self, limit))
        for child in set(multiprocessing.active_children()) - others:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(child.pid or 0, number)
        return received[-1]

    monkeypatch.setattr(Connection, "recv_bytes", signalled)
    assert isinstance(rendered("hi", CHATML), EncodedExample)
    assert len(received) > 2


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Although it ignores the signal by which Python ends it; it runs neither the program nor files in its folder."""
    lines = ["print('started', flush=True)", "from nemo_kto.data.tokens.rendering import renderer"]
    (tmp_path / "program.py").write_text("\n".join([*lines, "renderer(abs, -1, max_seconds=9)", "print('done')"]))
    (folder := tmp_path / "folder").mkdir()
    for module in ("multiprocessing", "signal"):  # what a new process imports first
        (folder / f"{module}.py").write_text("open('imported', 'w')")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.stdout == "started\ndone\n"
    assert not (folder / "imported").exists()
