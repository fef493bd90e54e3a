"""`nemo-kto data check`: the report, and errors for unusable rows and command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_kto.errors import UserError
from nemo_kto.tools.inspect import check_data_command as check
from tests.helpers.messages import Message
from tests.helpers.tiny_models import write_rows

HELLO = [{"role": "user", "content": "hello"}]
ROWS: list[Any] = [
    {"prompt": "p", "response": "yes", "preference": "chosen"},
    {"prompt": "p", "response": "yes", "preference": "rejected", "id": 3},
    {"prompt": "q", "response": "yes", "preference": "chosen"},
    {"prompt": "p", "response": "yes", "preference": "chosen"},
    {"prompt": HELLO, "completion": "you there", "label": True},
]


@pytest.fixture(autouse=True)
def in_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    check.main(argv)
    return capsys.readouterr().out.splitlines()


def refused(*argv: str) -> list[str]:
    with pytest.raises(UserError) as error:
        check.main(argv)
    return str(error.value).splitlines()


def balance(*figures: str) -> Message:
    """The line about both classes, with their figures and the settings that would balance them."""
    keys = ("desirable_loss_weight", "desirable", "undesirable_loss_weight", "undesirable")
    return Message("balance", *keys, "1", "4/3", *figures)


REPORT = [
    "rows.jsonl: 5 rows",
    Message("used", "1"),
    "  labels: preference: chosen is desirable; rejected is undesirable, label: true is desirable",
    "",
    "examples        5: 4 desirable, 1 undesirable",
    balance("4", "model.kto.desirable_loss_weight=1", "model.kto.undesirable_loss_weight=3", "model.kto.auto_balance=true"),
    "prompts         3 distinct, 1 with several examples, at most 3 (rows.jsonl:1)",
    Message("duplicates", "1", "prompt", "answer", "label", "first", "rows.jsonl:4", "rows.jsonl:1"),
    Message("contradictions", "3", "answer", "label", "first", "rows.jsonl:1", "rows.jsonl:2"),
    "characters                    min   median     90 %     99 %      max",
    "  prompt                        1        1        5        5        5",
    "  desirable answer              3        3        9        9        9",
    "  undesirable answer            3        3        3        3        3",
]


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS)
    assert shown(capsys, "rows.jsonl") == REPORT


def test_pairs_of_several_files(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    pair = {"prompt": "p", "chosen": "good", "rejected": "bad"}
    write_rows(Path("data/a.jsonl"), [pair, {**pair, "prompt": "q"}])
    write_rows(Path("data/b.jsonl"), [pair, {**pair, "chosen": "bad", "rejected": "good"}])
    lines = shown(
        capsys, "data", "data/a.jsonl", "--algorithm", "dpo", "--model", str(tokenizer_folder), "--seq-length", "5"
    )
    assert lines == [
        "data/a.jsonl: 2 rows",
        "data/b.jsonl: 2 rows",
        "",
        "pairs           4",
        "prompts         2 distinct, 1 with several pairs, at most 3 (data/a.jsonl:1)",
        Message("duplicates", "1", "prompt", "answer", "label", "first", "data/b.jsonl:1", "data/a.jsonl:1"),
        Message("contradictions", "3", "answers", "first", "data/a.jsonl:1", "data/b.jsonl:2"),
        "characters                    min   median     90 %     99 %      max",
        "  prompt                        1        1        1        1        1",
        "  chosen answer                 3        4        4        4        4",
        "  rejected answer               3        3        4        4        4",
        "tokens                        min   median     90 %     99 %      max",
        "  prompt                        1        1        1        1        1",
        "  chosen answer                 4        5        5        5        5",
        "  rejected answer               4        4        5        5        5",
        Message("prompt", "answer", "6"),
        Message("template", "4", "4", "model.data.apply_chat_template=true"),
        Message("truncated", "0", "prompts", "4", "answers", "model.data.seq_length=5"),
    ]
    # for KTO the same pairs are two examples each
    assert shown(capsys, "data")[3:5] == [
        "examples        8: 4 desirable, 4 undesirable",
        Message("balance", "desirable", "undesirable", "1", "4/3"),
    ]


def test_invalid_command_lines() -> None:
    Path("empty").mkdir()
    assert refused("none.jsonl", "empty") == [
        Message("FILE", "file", "folder", "files"),
        Message("none.jsonl"),
        Message("empty", "files"),
    ]
    write_rows(Path("rows.jsonl"), ROWS)
    assert refused("rows.jsonl", "--seq-length", "8") == [Message("--seq-length", "--model", "tokenizer", "FOLDER")]
    assert refused("rows.jsonl", "--fields", "prompt=question") == [Message("--fields", "OURS:COLUMN", "prompt=question")]
    assert refused("rows.jsonl", "--fields", "promt:question") == [Message("promt", "prompt?")]
    assert refused("rows.jsonl", "fields=promt:question") == [Message("promt", "prompt?")], "as in training"
    assert refused("rows.jsonl", "template=true") == [Message("--apply-chat-template", "--model")]
    assert refused("rows.jsonl", "template=false", "model.data.seq_length=1") == [Message("--seq-length", "2", "1")]
    assert refused("rows.jsonl", "--seq-length=1") == [Message("--seq-length", "integer", "2", "1")]
    assert refused("rows.jsonl", "--workers=0") == [Message("--workers", "integer", "1", "0")]


def test_rows_that_the_template_cannot_write(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    answers: list[dict[str, Any]] = [{"content": "<|im_end|>"}, {"content": "", "tool_calls": [call]}, {"content": "yes"}]
    rows = [{"prompt": HELLO, "response": [{"role": "assistant", **each}], "label": True} for each in answers]
    write_rows(Path("rows.jsonl"), rows)
    argv = ("rows.jsonl", "--model", str(tokenizer_folder))
    _, error = refused(*argv)
    assert error.startswith("  rows.jsonl:2: ")
    assert error == Message('"tool_calls" of the answer', "chat template", "model.data.drop=[unlabelled,lost_text]")
    capsys.readouterr()
    report = shown(capsys, *argv, "model.data.drop=[unlabelled,lost_text]")
    assert report[1:4] == [
        Message("left out", "1 row", "chat template", "model.data.drop"),
        Message("empty", "1 row", "empty_answers"),
        Message("special tokens", "1 row", "remove"),
    ]
    assert "examples        2: 2 desirable, 0 undesirable" in report
