"""Chat templates without end or measure: one error with file and row, and what is right is rendered as before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nemo_kto.data.rows.records import DataError, KTORecord, LastRowError, RowError, RowErrors
from nemo_kto.data.tokens import rendering
from nemo_kto.data.tokens.cache import KTO_EXAMPLES
from nemo_kto.data.tokens.chat import EncodedExample, RecordEncoder
from nemo_kto.data.tokens.rendering import RenderedText, render_rows
from nemo_kto.data.tokens.truncation import Truncation
from tests.helpers.messages import Message, assert_names
from tests.unit.data.toys import CHATML, chatml_tokenizer

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
    "a long output": (
        "{{ 'x' * 10**7 }}",
        ("10,000,000", "10,000,066", "template", "strings"),
    ),
}


def record(text: str, line: int) -> KTORecord:
    user, answer = {"role": "user", "content": text}, {"role": "assistant", "content": "yes"}
    return KTORecord(prompt=[user], response=[answer], desirable=True, line=line)


@pytest.mark.parametrize("kind", WITHOUT_END)
def test_a_template_without_end_is_one_error_that_names_its_file_and_the_row(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, told = WITHOUT_END[kind]
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.2 if told == TIME else 20)
    tokenizer = chatml_tokenizer("{% if 'now' in messages[0]['content'] %}" + template + "{% endif %}" + CHATML)
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("as in the tokenizer")
    encoder, broken, rows = RecordEncoder(tokenizer=tokenizer), RowErrors(), tmp_path / "rows.jsonl"
    truncation = Truncation(64, "keep_end", None)
    with pytest.raises(DataError) as error:
        list(KTO_EXAMPLES.examples([record("hi", 1), record("now", 2), record("now", 3)], encoder, truncation, rows, broken))
    file = tmp_path / "chat_template.jinja"
    line = 1 if kind.endswith("compiled") else 2
    assert str(error.value) == Message(f"{rows}:{line}", f"{file}", *told)
    if line == 2:
        assert isinstance(encoder.encode([record("hi", 1)])[0], EncodedExample)  # nothing is left behind


def test_a_template_that_calls_itself_is_a_broken_row() -> None:
    template = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"
    (refused,) = RecordEncoder(tokenizer=chatml_tokenizer(template)).encode([record("hi", 1)])
    assert type(refused) is RowError
    assert_names(refused, "chat template", "maximum recursion depth exceeded")


def test_the_first_row_at_a_limit_is_the_last_one_rendered(tmp_path: Path) -> None:
    def render(row: int) -> RenderedText:
        (tmp_path / str(row)).touch()
        if row == 1:
            raise RowError("of this row")
        return RenderedText("", "x" * (rendering.MAX_CHARACTERS + 1) if row == 2 else f"{row}")

    first, broken, *rest = render_rows(render, range(5), template="T")
    assert first == RenderedText("", "0")
    assert type(broken) is RowError
    assert str(broken) == "of this row"
    told = Message("T", "10,000,000", "10,000,001", "template", "strings")
    assert [(type(each), str(each)) for each in rest] == [(LastRowError, told)] * 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_process_that_is_ended_by_others_is_an_error_and_signals_to_the_job_are_not_its_business() -> None:
    def render(row: int) -> RenderedText:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        if row == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return RenderedText("a", "b")

    first, second = render_rows(render, range(2), template="T")
    assert first == RenderedText("a", "b")
    assert str(second) == Message("9", "template", "strings")


def test_an_interrupted_parent_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rendering, "MAX_SECONDS", 60)
    monkeypatch.setattr(rendering.json, "loads", interrupted)
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(rendering.os, "fork", lambda: children.append(fork()) or children[0])

    def render(row: int) -> RenderedText:
        while row:
            pass
        return RenderedText("a", "b")

    with pytest.raises(KeyboardInterrupt):
        render_rows(render, range(2), template="T")
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_text_that_is_not_unicode_is_rendered_as_it_is() -> None:
    assert render_rows(lambda row: RenderedText(row, "é\n"), ["\ud800 \0"], template="T") == [
        RenderedText("\ud800 \0", "é\n")
    ]
