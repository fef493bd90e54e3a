"""`nemo-kto data check`: the report, and errors for unusable rows and command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_kto.cli.data import check
from nemo_kto.data.rows import files
from nemo_kto.errors import UserError
from tests.helpers.messages import Message
from tests.helpers.tiny_models import make_rows, write_rows

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
    balance(
        "4",
        "model.kto.desirable_loss_weight=1",
        "model.kto.undesirable_loss_weight=3",
        "model.kto.auto_balance=true",
    ),
    "prompts         3 distinct, 1 with several examples, at most 3 (rows.jsonl:1)",
    Message("duplicates", "1", "prompt", "answer", "label", "first", "rows.jsonl:4", "rows.jsonl:1"),
    Message("contradictions", "3", "answer", "label", "first", "rows.jsonl:1", "rows.jsonl:2"),
    "characters                    min   median     90 %     99 %      max",
    "  prompt                        1        1        5        5        5",
    "  desirable answer              3        3        9        9        9",
    "  undesirable answer            3        3        3        3        3",
]
TOKENS = [  # one a byte; <|im_start|>, user, a line's end, hello, <|im_end|> and so on
    "tokens                        min   median     90 %     99 %      max",
    "  prompt                        1        1       24       24       24",
    "  desirable answer              4        4       10       10       10",
    "  undesirable answer            4        4        4        4        4",
    Message("prompt", "answer", "5", "34"),
    Message("template", "4", "5", "model.data.apply_chat_template=true"),
]


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS)
    assert shown(capsys, "rows.jsonl") == REPORT


def test_the_balance_uses_row_weights(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [*ROWS[:2], {**ROWS[1], "weight": 2.5}])
    assert shown(capsys, "rows.jsonl")[4:6] == [
        "examples        3: 1 desirable, 2 undesirable",
        balance(
            "3.5",
            "0.2857",
            "model.kto.desirable_loss_weight=3.5",
            "model.kto.undesirable_loss_weight=1",
            "model.kto.auto_balance=true",
        ),
    ]


def test_tokens_and_truncations_are_counted_with_a_model(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS)
    model = ("--model", str(tokenizer_folder))
    assert shown(capsys, "rows.jsonl", *model) == [*REPORT, *TOKENS]
    for length, counts in ((33, "1 prompt and 0 answers"), (10, "1 prompt and 1 answer"), (4, "1 prompt and 5 answers")):
        lines = shown(capsys, "rows.jsonl", *model, "--seq-length", str(length))
        assert lines[len(REPORT + TOKENS) :] == [Message("truncated", f"{counts}", f"model.data.seq_length={length}", "5")]


def test_tokens_with_the_chat_template(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS[:2])
    lines = shown(capsys, "rows.jsonl", "--model", str(tokenizer_folder), "--apply-chat-template")
    # <|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n
    assert lines[-4] == "  prompt                       20       20       20       20       20"
    assert not any(line.startswith("template") for line in lines)


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


def test_broken_rows_are_counted_after_the_report(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(
        Path("rows.jsonl"), [{"prompt": "p", "response": "r", "label": "x"}] * 12 + ROWS + [{"prompt": "", **ROWS[0]}]
    )
    write_rows(Path("more.jsonl"), [{"prompt": "", "response": "r", "label": True}])
    fault = Message("rows.jsonl:1", "label", "true", "false", "x", "12", "remove", "model.data.labels")
    assert refused("rows.jsonl") == ["12 broken rows:", fault]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rows.jsonl: 18 rows"
    assert lines[4] == "examples        6: 5 desirable, 1 undesirable"
    refusal = refused("rows.jsonl", "more.jsonl", "--model", str(tokenizer_folder))  # an empty prompt is found by tokenising
    assert refusal[0] == "13 broken rows:"
    assert refusal[2] == Message("more.jsonl:1", "prompt", "token")


def test_files_of_one_label_and_of_broken_rows(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS[2:3])
    lines = shown(capsys, "rows.jsonl")
    assert lines[4:6] == [Message("balance", "all", "desirable"), Message("prompts", "1")]
    assert lines[6:8] == [
        Message("duplicates", "0", "prompt", "answer", "label"),
        Message("contradictions", "0", "answer", "label"),
    ]
    Path("rows.jsonl").write_text("5\n")
    assert refused("rows.jsonl")[0] == "1 broken row:"
    assert capsys.readouterr().out == "rows.jsonl: 0 rows\n"


def test_parts_and_renamed_columns_change_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(300)
    write_rows(Path("rows.jsonl"), rows)
    whole = shown(capsys, "rows.jsonl")
    monkeypatch.setattr(files, "MIN_BYTES", 1500)
    assert files.number_of_parts(Path("rows.jsonl")) > 10
    assert shown(capsys, "rows.jsonl", "--workers", "2") == whole
    ours = {"prompt": "question", "response": "answer", "preference": "preference"}
    write_rows(Path("rows.jsonl"), [{column: row[name] for name, column in ours.items()} for row in rows])
    assert shown(capsys, "rows.jsonl", "--workers", "1", "--fields", "prompt:question,response:answer") == whole


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
    for option in ("--seq-length=1", "--workers=0"):
        with pytest.raises(SystemExit) as ended:
            check.main(["rows.jsonl", option])
        assert ended.value.code == 2


def test_files_without_rows_are_errors() -> None:
    write_rows(Path("rows.jsonl"), ROWS)
    Path("empty.jsonl").write_text("\n")
    Path("header.csv").write_text("prompt,response,label\n")
    fault = "at least one row"
    assert refused("rows.jsonl", "empty.jsonl", "header.csv") == [
        Message("2 broken rows"),
        Message("empty.jsonl:1", fault),
        Message("header.csv:1", fault),
    ]


def test_messages_as_text_need_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [{**ROWS[0], "prompt": str(HELLO)}])
    assert refused("rows.jsonl")[1] == Message("rows.jsonl:1", "model.data.json_columns=[prompt]")
    assert "  prompt                        5        5        5        5        5" in shown(
        capsys, "rows.jsonl", "--json-columns", "prompt"
    )
    assert refused("rows.jsonl", "--json-columns", "question") == [Message("--json-columns", "prompt", "question")]
