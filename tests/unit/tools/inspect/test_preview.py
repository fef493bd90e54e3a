"""`nemo-kto data preview`: its output and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_kto.errors import UserError
from nemo_kto.tools.inspect import preview_command as preview
from nemo_kto.tools.inspect.preview_command import Marks
from tests.helpers.messages import Message, assert_names, raises
from tests.helpers.outputs import assert_output
from tests.helpers.tiny_models import write_rows

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


DPO = ["--algorithm", "dpo"]
PAIR = {"prompt": "p", "chosen": " good", "rejected": " bad"}
PLAIN = {"prompt": "hi", "response": "hello", "label": True}
CASES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "unpaired": (
        [
            {"messages": [USER, GOOD], "label": True, "id": 7},
            {"prompt": "a: ", "response": "bcdefghij" * 5, "preference": "rejected"},
            {"prompt": "c<|im_end|>: ", "completion": "d<|im_end|>e", "label": True},
            {"prompt": "not shown", "completion": "f", "label": True},
        ],
        ["model.data.seq_length=32"],
    ),
    "control-characters": ([{"prompt": "a\x1b[2J\tb\r", "completion": "c\x9b1m", "label": True}], ["--rows=1"]),
    "pairs": ([PAIR, {**PAIR, "weight": 2.5}], [*DPO]),
    "pairs-with-rewards": (
        [PAIR, {**PAIR, "chosen_reward": 3.5, "rejected_reward": 1}],
        [*DPO, "model.dpo.preference_loss=rpo_sq"],
    ),
    "pairs-as-examples": ([{**PAIR, "weight": 2.5}, PAIR], ["--rows=1"]),
    "one-row": ([{"question": "q", "answer": "a", "label": False}], ["model.data.fields={prompt:question,response:answer}"]),
    "no-kl-examples": ([PLAIN, PLAIN], ["--rows=1", "model.kto.preference_loss=apo_zero_unpaired"]),
    "plain-text-with-the-template": ([PLAIN], ["model.data.apply_chat_template=true"]),
    "messages": ([{**PLAIN, "prompt": [USER]}], []),
    "rendered-already": ([{**PLAIN, "prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}], []),
    "first-global-batch": (
        [{"prompt": f"p{number}", "response": "r", "label": True} for number in range(4)] + [{}],
        ["model.global_batch_size=4", "--rows=1"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_output(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows, words = CASES[name]
    write_rows(Path("rows.jsonl"), rows)
    lines = shown(capsys, "rows.jsonl", "--model", model, *words)
    assert_output(f"data-preview-{name}", "\n".join([*lines, ""]), MODEL=model)


def test_broken_rows_of_the_first_global_batch_are_refused(model: str) -> None:
    write_rows(Path("rows.jsonl"), CASES["first-global-batch"][0])
    with raises(UserError, "rows.jsonl:5"):
        preview.main(["rows.jsonl", "--model", model])


def test_colours_are_reset_at_the_end_of_a_line() -> None:
    marks = Marks(coloured=True)
    assert marks.mark("answer", "a\nb") == "\x1b[32ma\x1b[0m\n\x1b[32mb\x1b[0m"
    assert marks.mark("prompt", "a\n") == "\x1b[2ma\x1b[0m\n"
    assert marks.legend() == "\x1b[2mprompt\x1b[0m, \x1b[32mtrained on\x1b[0m"


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
        Message("rows.jsonl:1", "question", "prompt", "fields=prompt:question"),
    ]


def test_invalid_numbers_of_rows() -> None:
    for number in ("0", "-1", "x"):
        with raises(UserError, "--rows", "integer", "1", number):
            preview.main(["rows.jsonl", f"--rows={number}"])
