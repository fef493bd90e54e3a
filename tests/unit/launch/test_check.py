"""`nemo-kto data check`: the exact report, and what is said of rows and command lines that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.data import parts
from nemo_kto.errors import UserError
from nemo_kto.launch import check
from tests.tiny import make_rows, write_rows

HELLO = [{"role": "user", "content": "hello"}]
ROWS = [
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


REPORT = [
    "rows.jsonl: 5 rows",
    "  columns that are not used: id (1 row)",
    "",
    "examples        5: 4 desirable, 1 undesirable",
    "balance         desirable_loss_weight * desirable rows / (undesirable_loss_weight * undesirable rows) should be from 1 "
    "to 4/3, got 1 * 4 / (1 * 1) = 4; set model.kto.desirable_loss_weight=1 and model.kto.undesirable_loss_weight=3, or "
    "model.kto.auto_balance=true",
    "prompts         3 different, 1 of several examples, at most 3 (that at rows.jsonl:1)",
    "duplicates      1 example with prompt, answer and label of an earlier one, the first at rows.jsonl:4, which repeats "
    "rows.jsonl:1",
    "contradictions  3 examples whose answer has the other label too, the first at rows.jsonl:1, against rows.jsonl:2",
    "characters                  least     half     90 %     99 %     most",
    "  prompt                        1        1        5        5        5",
    "  desirable answer              3        3        9        9        9",
    "  undesirable answer            3        3        3        3        3",
]
TOKENS = [  # one a byte; <|im_start|>, user, a line's end, hello, <|im_end|> and so on
    "tokens                      least     half     90 %     99 %     most",
    "  prompt                        1        1       24       24       24",
    "  desirable answer              4        4       10       10       10",
    "  undesirable answer            4        4        4        4        4",
    "  prompt and answer             5        5       34       34       34",
]


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS)
    assert shown(capsys, "rows.jsonl") == REPORT


def test_rows_count_in_the_balance_with_their_weights(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [*ROWS[:2], {**ROWS[1], "weight": 2.5}])
    assert shown(capsys, "rows.jsonl")[3:5] == [
        "examples        3: 1 desirable, 2 undesirable",
        "balance         desirable_loss_weight * desirable rows / (undesirable_loss_weight * undesirable rows) should be "
        "from 1 to 4/3, got 1 * 1 / (1 * 3.5) = 0.2857; set model.kto.desirable_loss_weight=3.5 and "
        "model.kto.undesirable_loss_weight=1, or model.kto.auto_balance=true",
    ]


def test_with_a_model_it_counts_tokens_and_what_is_truncated(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("rows.jsonl"), ROWS)
    model = ("--model", str(tokenizer_folder))
    assert shown(capsys, "rows.jsonl", *model) == [*REPORT, *TOKENS]
    for length, told in ((33, "1 prompt and 0 answers"), (10, "1 prompt and 1 answer"), (4, "1 prompt and 5 answers")):
        lines = shown(capsys, "rows.jsonl", *model, "--seq-length", str(length))
        assert lines[len(REPORT + TOKENS) :] == [f"truncated       {told} at model.data.seq_length={length}, of 5"]


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
        "prompts         2 different, 1 of several pairs, at most 3 (that at data/a.jsonl:1)",
        "duplicates      1 pair with prompt, answer and label of an earlier one, the first at data/b.jsonl:1, which repeats "
        "data/a.jsonl:1",
        "contradictions  3 pairs whose answers stand the other way round, the first at data/a.jsonl:1, against "
        "data/b.jsonl:2",
        "characters                  least     half     90 %     99 %     most",
        "  prompt                        1        1        1        1        1",
        "  chosen answer                 3        4        4        4        4",
        "  rejected answer               3        3        4        4        4",
        "tokens                      least     half     90 %     99 %     most",
        "  prompt                        1        1        1        1        1",
        "  chosen answer                 4        5        5        5        5",
        "  rejected answer               4        4        5        5        5",
        "  prompt and answer             6        6        6        6        6",
        "truncated       0 prompts and 4 answers at model.data.seq_length=5, of 4",
    ]
    # for KTO the same pairs are two examples each
    assert shown(capsys, "data")[3:5] == [
        "examples        8: 4 desirable, 4 undesirable",
        "balance         desirable / undesirable = 1, from 1 to 1.333, as it should be: weights of 1 are fine",
    ]


def test_broken_rows_are_counted_after_the_report(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(
        Path("rows.jsonl"), [{"prompt": "p", "response": "r", "label": "x"}] * 12 + ROWS + [{"prompt": "", **ROWS[0]}]
    )
    write_rows(Path("more.jsonl"), [{"prompt": "", "response": "r", "label": True}])
    fault = "\"label\" must be true or false, got 'x'; correct it or remove the row (the same in 11 more, up to line 12)"
    assert refused("rows.jsonl") == ["12 broken rows:", f"  rows.jsonl:1: {fault}"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rows.jsonl: 18 rows"
    assert lines[3] == "examples        6: 5 desirable, 1 undesirable"
    said = refused("rows.jsonl", "more.jsonl", "--model", str(tokenizer_folder))  # an empty prompt is found by tokenising
    assert said[0] == "13 broken rows:"
    assert said[2].startswith("  more.jsonl:1: the prompt must have at least one token")


def test_a_file_of_one_kind_and_one_of_broken_rows_only(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS[2:3])
    lines = shown(capsys, "rows.jsonl")
    assert lines[3:5] == ["balance         all examples are desirable", "prompts         1 different, each of one example"]
    assert lines[5:7] == [
        "duplicates      0 examples with prompt, answer and label of an earlier one",
        "contradictions  0 examples whose answer has the other label too",
    ]
    Path("rows.jsonl").write_text("[]\n")
    assert refused("rows.jsonl")[0] == "1 broken row:"
    assert capsys.readouterr().out == "rows.jsonl: 0 rows\n"


def test_parts_and_renamed_columns_change_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(300)
    write_rows(Path("rows.jsonl"), rows)
    whole = shown(capsys, "rows.jsonl")
    monkeypatch.setattr(parts, "MIN_BYTES", 1500)
    assert parts.number_of_parts(Path("rows.jsonl")) > 10
    assert shown(capsys, "rows.jsonl", "--workers", "2") == whole
    ours = {"prompt": "question", "response": "answer", "preference": "preference"}
    write_rows(Path("rows.jsonl"), [{column: row[name] for name, column in ours.items()} for row in rows])
    assert shown(capsys, "rows.jsonl", "--workers", "1", "--fields", "prompt:question,response:answer") == whole


def test_mistakes() -> None:
    Path("empty").mkdir()
    assert refused("none.jsonl", "empty") == [
        "FILE must be a jsonl file, or a folder with such files:",
        "  got none.jsonl, which does not exist",
        "  got empty, which has no jsonl file",
    ]
    write_rows(Path("rows.jsonl"), ROWS)
    assert refused("rows.jsonl", "--seq-length", "8") == [
        "--seq-length must come with --model, whose tokenizer makes tokens of the rows; add --model FOLDER"
    ]
    assert refused("rows.jsonl", "--fields", "prompt=question") == [
        "--fields must be OURS:COLUMN, separated by commas, got prompt=question; e.g. --fields prompt:question"
    ]
    assert refused("rows.jsonl", "--fields", "promt:question")[0].endswith("got promt; did you mean prompt?")
    for option in ("--seq-length=1", "--workers=0"):
        with pytest.raises(SystemExit) as ended:
            check.main(["rows.jsonl", option])
        assert ended.value.code == 2
