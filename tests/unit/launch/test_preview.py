"""`nemo-kto data preview`: the exact text, and what is said where nothing can be shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.data.preview import Marks
from nemo_kto.errors import UserError
from nemo_kto.launch import preview
from tests.tiny import make_tokenizer, write_rows

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
        f"rows.jsonl as {model} sees it in `nemo-kto kto`",
        "Marks: the prompt, [[what is trained on]], {{what is masked}}.",
        "Of the first rows, columns that are not used: id (1 row).",
        "KL examples: as if the first 4 examples were a global batch; training shuffles them.",
        "",
        "line 1: desirable, 21 + 6 = 27 of at most 32 tokens",
        "  | <|im_start|>user",
        "  | hi<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[hello<|im_end|>]]",
        "  KL example: this prompt with the answer of line 3, 21 + 11 = 32 of at most 32 tokens",
        "  | [[bcdefghijbc]]",
        "",
        "line 3: undesirable, 1 + 31 = 32 of at most 32 tokens, prompt and answer cut",
        "  |  [[bcdefghijbcdefghijbcdefghijbcde]]",
        "  KL example: this prompt with the answer of line 4, 1 + 4 = 5 of at most 32 tokens",
        "  | [[d<|im_end|>]]{{e}}[[<|im_end|>]]",
        "",
        "line 4: desirable, 4 + 4 = 8 of at most 32 tokens",
        "  | c<|im_end|>: [[d<|im_end|>]]{{e}}[[<|im_end|>]]",
        "  KL example: this prompt with the answer of line 5, 4 + 2 = 6 of at most 32 tokens",
        "  | [[f<|im_end|>]]",
    ]


def test_rows_do_not_control_the_terminal(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a\x1b[2J\tb\r", "completion": "c\x9b1m", "label": True}))
    lines = shown(capsys, "rows.jsonl", "--model", model, "--rows", "1")
    assert lines[-1] == r"  | a\x1b[2J" + "\t" + r"b\r[[c\x9b1m<|im_end|>]]"


def test_pairs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = {"prompt": "p", "chosen": " good", "rejected": " bad"}
    write_rows(Path("pairs.jsonl"), [pair, {**pair, "chosen_reward": 3.5, "rejected_reward": 1}])
    text = ["  chosen, 1 + 6 = 7 of at most 2048 tokens", "  | p[[ good<|im_end|>]]"]
    text += ["  rejected, 1 + 5 = 6 of at most 2048 tokens", "  | [[ bad<|im_end|>]]"]
    arguments = ("pairs.jsonl", "--model", model, "--algorithm", "dpo")
    assert shown(capsys, *arguments, "--rows", "1")[2:] == ["", "line 1: a pair", *text]
    with_rewards = shown(capsys, *arguments, "model.dpo.preference_loss=rpo_sq")[2:]
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
        "line 1: desirable, 1 + 6 = 7 of at most 2048 tokens",
        "  KL example: this prompt with the answer of line 1, which was given to the same prompt, 1 + 5 = 6 of at most "
        "2048 tokens",
        "line 1: undesirable, 1 + 5 = 6 of at most 2048 tokens",
        "  KL example: this prompt with the answer of line 2, which was given to the same prompt, 1 + 6 = 7 of at most "
        "2048 tokens",
    ]


def test_one_row_and_a_loss_without_kl_examples(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [{"question": "q", "answer": "a", "label": False}])
    fields = "model.data.fields={prompt:question,response:answer}"
    for override in ("model.kto.preference_loss=kto", "model.kto.preference_loss=apo_zero_unpaired"):
        lines = shown(capsys, "rows.jsonl", "--model", model, fields, override)
        assert lines[2:] == ["", "line 1: undesirable, 1 + 2 = 3 of at most 2048 tokens", "  | q[[a<|im_end|>]]"]


def test_colours_end_with_the_line() -> None:
    marks = Marks(coloured=True)
    assert marks.mark("answer", "a\nb") == "\x1b[32ma\x1b[0m\n\x1b[32mb\x1b[0m"
    assert marks.mark("prompt", "a\n") == "\x1b[2ma\x1b[0m\n"
    assert marks.legend() == "\x1b[2mprompt\x1b[0m, \x1b[32mtrained on\x1b[0m, \x1b[31mmasked\x1b[0m"


def test_a_file_without_a_model() -> None:
    assert refused("rows.jsonl") == [
        "--model must name a Hugging Face folder, whose tokenizer and chat template make tokens of the rows, got none; e.g. "
        "nemo-kto data preview rows.jsonl --model MODEL"
    ]


def test_a_folder_in_the_place_of_a_file(model: str) -> None:
    assert refused(".", "--model", model) == ["FILE must be a jsonl file, got the folder .; name one of its files"]


def test_mistakes_come_together_and_those_of_the_machine_do_not_matter(model: str) -> None:
    said = refused("none.jsonl", "--model", "nowhere", "trainer.devices=64", "model.data.seq_length=1")
    assert said[0] == "nothing can be shown:"
    assert [line.split()[0] for line in said[1:]] == [
        "pretrained_checkpoint.restore_from_path", "model.data.data_prefix", "model.data.seq_length",
    ]  # fmt: skip
    assert "got nowhere" in said[1]
    assert "got none.jsonl" in said[2]
    write_rows(Path("rows.jsonl"), [{"prompt": "p", "response": "r", "label": True}])
    misspelt = refused("rows.jsonl", "--model", model, "model.data.seq_lenght=5")
    assert misspelt[1].endswith("did you mean model.data.seq_length?")


def test_broken_rows_are_named_by_the_file_that_was_given(model: str) -> None:
    write_rows(Path("rows.jsonl"), [{"question": "Q?", "chosen": "it is a", "rejected": "it is b"}])
    assert refused("rows.jsonl", "--model", model) == [
        "1 broken row:",
        '  rows.jsonl:1: "question" would be lost, the row has no "prompt"; name the columns with '
        "'model.data.fields={prompt:question}'",
    ]


def test_only_the_rows_of_one_global_batch_are_read(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "p", "response": "r", "label": True}
    write_rows(Path("rows.jsonl"), [{**row, "prompt": f"p{number}"} for number in range(4)] + [{}])
    with pytest.raises(UserError, match=r"rows\.jsonl:5: "):
        preview.main(["rows.jsonl", "--model", model])
    lines = shown(capsys, "rows.jsonl", "--model", model, "model.global_batch_size=4", "--rows", "1")
    assert lines[2].startswith("KL examples: as if the first 4 examples")
    assert "answer of line 2" in lines[-2]


def test_numbers_of_rows_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("0", "-1", "x"):
        with pytest.raises(SystemExit) as ended:
            preview.main(["rows.jsonl", f"--rows={number}"])
        assert ended.value.code == 2
        assert f"argument --rows: must be an integer of at least 1, got {number}" in capsys.readouterr().err


def test_the_tokenizer_of_the_tests_has_one_token_a_byte() -> None:
    assert len(make_tokenizer()("hello")["input_ids"]) == 5  # the numbers above are those of bytes
