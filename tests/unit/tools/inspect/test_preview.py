"""`nemo-kto data preview`: its output and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.tools.inspect import preview_command as preview
from nemo_kto.tools.inspect.data_preview import Marks
from tests.helpers.messages import Message, assert_names, raises
from tests.helpers.tiny_models import write_rows

UNTEMPLATED = Message("Prompts", "model.data.apply_chat_template=true")
USER, GOOD = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.fixture
def model(tiny_llama: Path) -> str:
    return str(tiny_llama)


@pytest.fixture(autouse=True)
def in_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    preview.main(argv)
    return capsys.readouterr().out.splitlines()


def refused(*argv: str) -> list[str]:
    with pytest.raises(UserError) as error:
        preview.main(argv)
    return str(error.value).splitlines()


def test_unpaired_rows_with_their_kl_examples(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(
        json.dumps({"messages": [USER, GOOD], "label": True, "id": 7})
        + "\n\n"
        + json.dumps({"prompt": "a: ", "response": "bcdefghij" * 5, "preference": "rejected"})
        + "\n"
        + json.dumps({"prompt": "c<|im_end|>: ", "completion": "d<|im_end|>e", "label": True})
        + "\n"
        + json.dumps({"prompt": "not shown", "completion": "f", "label": True})
    )
    assert shown(capsys, "rows.jsonl", "--model", model, "model.data.seq_length=32", "model.data.eod_mask_loss=true") == [
        Message("rows.jsonl", f"{model}", "kto"),
        Message("Marks", "prompt"),
        Message("first", "used", "1"),
        Message("first", "1 row", "special tokens", "remove"),
        Message("KL", "examples", "first", "4", "training"),
        "",
        Message("1", "desirable", "21", "6", "27", "32"),
        "  | <|im_start|>user",
        "  | hi<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[hello<|im_end|>]]",
        Message("KL", "example", "prompt", "answer", "3", "21", "11", "32"),
        "  | [[bcdefghijbc]]",
        "",
        Message("3", "undesirable", "1", "31", "32", "prompt", "answer"),
        "  |  [[bcdefghijbcdefghijbcdefghijbcde]]",
        Message("KL", "example", "prompt", "answer", "4", "1", "5", "32"),
        "  | [[d<|im_end|>]]{{e}}[[<|im_end|>]]",
        "",
        Message("4", "desirable", "8", "32"),
        "  | c<|im_end|>: [[d<|im_end|>]]{{e}}[[<|im_end|>]]",
        Message("KL", "example", "prompt", "answer", "5", "4", "2", "6", "32"),
        "  | [[f<|im_end|>]]",
    ]


def test_rows_do_not_control_the_terminal(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a\x1b[2J\tb\r", "completion": "c\x9b1m", "label": True}))
    lines = shown(capsys, "rows.jsonl", "--model", model, "--rows", "1")
    assert lines[-1] == r"  | a\x1b[2J" + "\t" + r"b\r[[c\x9b1m<|im_end|>]]"


def test_pairs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = {"prompt": "p", "chosen": " good", "rejected": " bad"}
    write_rows(Path("pairs.jsonl"), [pair, {**pair, "chosen_reward": 3.5, "rejected_reward": 1}])
    text = [Message("chosen", "1", "6", "7", "2048"), "  | p[[ good<|im_end|>]]"]
    text += [Message("rejected", "1", "5", "6", "2048"), "  | [[ bad<|im_end|>]]"]
    arguments = ("pairs.jsonl", "--model", model, "--algorithm", "dpo")
    assert shown(capsys, *arguments, "--rows", "1")[3:] == ["", "line 1: a pair", *text]
    with_rewards = shown(capsys, *arguments, "model.dpo.preference_loss=rpo_sq")[3:]
    assert with_rewards == ["", "line 1: a pair, rewards 1 and 0", *text, "", "line 2: a pair, rewards 3.5 and 1", *text]
    write_rows(Path("weights.jsonl"), [{**pair, "weight": 2.5}, pair])
    with_weights = shown(capsys, "weights.jsonl", *arguments[1:])
    assert [line for line in with_weights if line.startswith("line")] == ["line 1: a pair, weight 2.5", "line 2: a pair"]
    with_weights = shown(capsys, "weights.jsonl", "--model", model, "--rows", "1")
    assert [line[:28] for line in with_weights if line.startswith("line")] == [
        "line 1: desirable, weight 2.",
        "line 1: undesirable, weight ",
    ]
    # the same file in KTO: a pair is two examples, and both are answers to one prompt
    lines = shown(capsys, "pairs.jsonl", "--model", model, "--rows", "1")
    assert [line for line in lines if line.startswith(("line", "  KL"))] == [
        Message("1", "desirable", "6", "7", "2048"),
        Message("KL", "example", "prompt", "answer", "1", "5", "6", "2048"),
        Message("1", "undesirable", "5", "6", "2048"),
        Message("KL", "example", "prompt", "answer", "2", "1", "6", "7", "2048"),
    ]


def test_one_row_and_a_loss_without_kl_examples(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [{"question": "q", "answer": "a", "label": False}])
    fields = "model.data.fields={prompt:question,response:answer}"
    for override in ("model.kto.preference_loss=kto", "model.kto.preference_loss=apo_zero_unpaired"):
        lines = shown(capsys, "rows.jsonl", "--model", model, fields, override)
        assert lines[2:] == [UNTEMPLATED, "", Message("1", "undesirable", "2", "3", "2048"), "  | q[[a<|im_end|>]]"]


def test_plain_text_with_the_chat_template(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [{"prompt": "hi", "response": "hello", "label": True}])
    assert shown(capsys, "rows.jsonl", "--model", model)[2] == UNTEMPLATED
    assert shown(capsys, "rows.jsonl", "--model", model, "model.data.apply_chat_template=true")[2:] == [
        Message("Prompts", "model.data.apply_chat_template"),
        "",
        Message("1", "desirable", "21", "6", "27", "2048"),
        "  | <|im_start|>user",
        "  | hi<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[hello<|im_end|>]]",
    ]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for prompt in (rendered, [USER]):
        write_rows(Path("rows.jsonl"), [{"prompt": prompt, "response": "hello", "label": True}])
        assert shown(capsys, "rows.jsonl", "--model", model)[2] == ""


def test_colours_are_reset_at_the_end_of_a_line() -> None:
    marks = Marks(coloured=True)
    assert marks.mark("answer", "a\nb") == "\x1b[32ma\x1b[0m\n\x1b[32mb\x1b[0m"
    assert marks.mark("prompt", "a\n") == "\x1b[2ma\x1b[0m\n"
    assert marks.legend() == "\x1b[2mprompt\x1b[0m, \x1b[32mtrained on\x1b[0m, \x1b[31mmasked\x1b[0m"


def test_all_errors_together_without_those_of_the_machine(model: str) -> None:
    refusal = refused("none.jsonl", "--model", "nowhere", "trainer.devices=64", "model.data.seq_length=1")
    assert refusal[0] == Message("rows", "shown")
    assert [line.split()[0] for line in refusal[1:]] == [
        "pretrained_checkpoint.restore_from_path", "model.data.data_prefix", "model.data.seq_length",
    ]  # fmt: skip
    assert_names(refusal[1], "nowhere")
    assert_names(refusal[2], "none.jsonl")
    write_rows(Path("rows.jsonl"), [{"prompt": "p", "response": "r", "label": True}])
    misspelt = refused("rows.jsonl", "--model", model, "model.data.seq_lenght=5")
    assert misspelt[1] == Message("model.data.seq_lenght", "model.data.seq_length?")


def test_broken_rows_are_named_with_the_given_path(model: str) -> None:
    write_rows(Path("rows.jsonl"), [{"question": "Q?", "chosen": "it is a", "rejected": "it is b"}])
    assert refused("rows.jsonl", "--model", model) == [
        "1 broken row:",
        Message("rows.jsonl:1", "question", "prompt", "model.data.fields={prompt:question}"),
    ]


def test_only_the_rows_of_one_global_batch_are_read(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "p", "response": "r", "label": True}
    write_rows(Path("rows.jsonl"), [{**row, "prompt": f"p{number}"} for number in range(4)] + [{}])
    with raises(UserError, "rows.jsonl:5"):
        preview.main(["rows.jsonl", "--model", model])
    lines = shown(capsys, "rows.jsonl", "--model", model, "model.global_batch_size=4", "--rows", "1")
    assert lines[3] == Message("KL", "4")
    assert lines[-2] == Message("KL", "line 2")


def test_invalid_numbers_of_rows() -> None:
    for number in ("0", "-1", "x"):
        with raises(UserError, "--rows", "integer", "1", number):
            preview.main(["rows.jsonl", f"--rows={number}"])
