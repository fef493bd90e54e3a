"""Remedies that messages print: each is followed as printed, and the command then succeeds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import datasets
import pytest

from nemo_kto.cli import main as cli
from tests.helpers.messages import assert_names

_SUGGESTED = re.compile(r"'((?:model\.[^']+|fields)=[^']*)'")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Return the exit status of a command, and all that it prints."""
    capsys.readouterr()
    status: object = 0
    try:
        cli.main(argv)
    except SystemExit as end:
        status = end.code or 0
    said = capsys.readouterr()
    assert isinstance(status, int)
    return status, said.out + said.err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def thumb(number: int) -> str:
    return ("up", "down")[number % 2]


TURNS = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
FILES: dict[str, list[dict]] = {
    "columns of another name": [{"user_question": "q", "bot_answer": "a", "rating": thumb(n)} for n in range(4)],
    "LLaMA-Factory": [{"conversations": TURNS, "kto_tag": n % 2 == 0} for n in range(4)],
    "labels of another kind": [{"prompt": "q", "response": "a", "label": n % 2 + 3} for n in range(4)],
    "messages as text": [
        {"prompt": json.dumps([{"role": "user", "content": "q"}]), "response": "a", "label": True} for _ in range(4)
    ],
}


@pytest.mark.parametrize("kind", FILES)
def test_settings_suggested_for_a_file(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line takes the setting as it is printed, in data check as in training."""
    write_rows(here / "rows.jsonl", FILES[kind])
    status, said = run(capsys, "data", "check", "rows.jsonl")
    assert status == 2
    setting = _SUGGESTED.findall(said)[0]
    status, said = run(capsys, "data", "check", "rows.jsonl", setting)
    assert status == 0, said
    assert "examples        4" in said


def test_blank_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q", "response": "a", "label": label} for label in (True, False, None, "")]
    write_rows(here / "rows.jsonl", rows)
    status, said = run(capsys, "data", "check", "rows.jsonl", "model.data.drop=[]")
    assert status == 2
    status, said = run(capsys, "data", "check", "rows.jsonl", *_SUGGESTED.findall(said))
    assert status == 0
    assert "left out: 2 rows without a label" in said


def test_paths_that_contain_an_equals_sign(here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a=b").mkdir()
    shutil.copytree(tiny_llama, here / "a=b/m=1")
    write_rows(here / "a=b/k=1.jsonl", [{"prompt": "q", "response": "a", "label": True}] * 4)
    status, said = run(capsys, "plan", "kto", "a=b/m=1", "a=b/k=1.jsonl", "hardware=cpu")
    assert status == 0, said
    status, said = run(capsys, "plan", "kto", "pretrained_checkpoint.restore_from_path=a=b/m=1", "hardware=cpu")
    assert status == 2
    (quoted,) = re.findall(r"put it in quotes: '([^']*)'", said)
    status, said = run(capsys, "plan", "kto", quoted.replace("...", "a=b/m=1"), "hardware=cpu")
    assert status == 0, said
    # a word that does not exist as a path is a mistyped key
    status, said = run(capsys, "plan", "kto", "a=b/m=1", "lrr=1", "hardware=cpu")
    assert status == 2
    assert "lrr" in said


def test_a_folder_of_save_to_disk_is_shown(here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q", "response": "a", "label": True}] * 4
    datasets.Dataset.from_list(rows).save_to_disk(str(here / "disk"))
    status, said = run(capsys, "data", "preview", "disk", "--model", str(tiny_llama), "model.data.seq_length=64")
    assert status == 0, said
    assert "q[[a<|im_end|>]]" in said


def test_help_for_the_data_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, "data", "--help")
    assert status == 0
    assert re.findall(r"^  (\w+)  ", said.partition("Commands:")[2], re.MULTILINE) == ["preview", "check", "tokenise"]


@pytest.mark.parametrize("kind", ["H100", "a100-40", "GB200", "b200", "L40S"])
def test_gpus_in_any_case(kind: str, here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, "plan", "kto", str(tiny_llama), "--gpus", "1", "--gpu", kind)
    assert status == 0, said
    assert kind.split("-")[0].upper() in said.splitlines()[0]


def test_an_unknown_gpu(here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, "plan", "kto", str(tiny_llama), "--gpus", "1", "--gpu", "MI300X")
    assert status == 2
    assert_names(said.splitlines()[-1], "--gpu", "a100", "b200", "MI300X", "--memory")
    status, said = run(capsys, "plan", "kto", str(tiny_llama), "--gpus", "1", "--gpu-memory", "192")
    assert (status, "192.0 GB each" in said) == (0, True)


def test_a_misspelt_loss_lists_the_names_of_its_module(
    here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "losses_of_mine.py").write_text("import math as _math\nfrom pathlib import Path\n\ndef square():\n    pass\n")
    status, said = run(
        capsys, "plan", "kto", str(tiny_llama), "hardware=cpu", "model.kto.preference_loss=losses_of_mine.sqare"
    )
    assert status == 2
    assert_names(said, "losses_of_mine", "square", "Path")


def test_full_recomputation_needs_no_further_setting(
    here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = "model.activations_checkpoint_granularity=full"
    given = ["model.activations_checkpoint_method=uniform", "model.activations_checkpoint_num_layers=1"]
    plans = [run(capsys, "plan", "kto", str(tiny_llama), "--gpus", "1", full, *more) for more in ([], given)]
    assert plans[0] == plans[1]
    assert plans[0][0] == 0
