"""Hostile command lines: each ends with status 2 and an error, without a start and without a traceback."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from nemo_kto.cli import job, main
from nemo_kto.processes import launcher
from tests.helpers.messages import read_cases
from tests.helpers.tiny_models import write_stub_adapter, write_stub_model

GOOD = ["pretrained_checkpoint.restore_from_path=model", "model.data.data_prefix=rows.jsonl", "trainer.accelerator=cpu"]
OWN_FILES = {
    "mine": "defaults: [gpt_kto, _self_]\nmodel:\n  optim:\n    lr: -1\n    learning_rate: 1\n  data:\n    seq_len: 4\n"
    "trainer:\n  devices: many\n",
    "notyaml": "model: [1, 2\n  x: {",
    "list": "- 1\n- 2\n",
    "loopdef": "defaults:\n  - loopdef\n",
    "nodef": "defaults:\n  - nowhere\n",
    "emptyfile": "",
    "interp": "defaults: [gpt_kto, _self_]\nmodel:\n  optim:\n    lr: ${nothing.here}\n",
    "dup": "defaults:\n  - gpt_kto\n  - _self_\nmodel:\n  seed: 1\n  seed: 2\n",
}


CORPUS = dict(read_cases(Path(__file__).with_name("commands.txt")))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an adapter, rows, files of one's own, and things that are in the way."""
    folder = tmp_path_factory.mktemp("hostile")
    write_stub_model(folder / "model")
    write_stub_adapter(folder / "adapter")
    (folder / "rows.jsonl").write_text('{"prompt": "p", "response": "r", "preference": "chosen"}\n')
    for name, text in OWN_FILES.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "file").write_text("x")
    (folder / "loop").symlink_to("loop")
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("x")
    (folder / "checkpoints_run" / "checkpoints" / "step_000003").mkdir(parents=True)
    return folder


def started(*_: object) -> NoReturn:
    raise AssertionError("it was started")


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as the current one, without a launcher's environment; nothing is started there."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["nemo-kto"])
    monkeypatch.setattr(job.Job, "_train", started)
    monkeypatch.setattr(launcher, "spawn_ranks", started)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in ("HYDRA_FULL_ERROR", "NEMO_KTO_FORCE_CPU", *of_ranks):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    return place


def output_of(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Output of a command, which must end with status 2."""
    words = shlex.split(command.replace("LONG", "x" * 5000))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    name, *rest = (word.replace("\\0", "\0") for word in words)
    given = GOOD if name in ("kto", "dpo") and "RAW" not in rest else []
    with pytest.raises(SystemExit) as ended:
        main.main([name, *given, *(word for word in rest if word != "RAW")])
    printed = capsys.readouterr()
    assert ended.value.code == 2, printed
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


@pytest.mark.filterwarnings("ignore:Experimental rerun")
@pytest.mark.parametrize("command", CORPUS, ids=lambda command: command[:60])
def test_the_error_names_the_cause(
    here: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(here.rglob("*"))
    output = output_of(command, capsys, monkeypatch).replace(str(here), "CWD").replace("\0", "\\0")
    assert [output] == CORPUS[command]
    assert sorted(here.rglob("*")) == before, "something was written"


def test_all_unknown_keys_of_a_file_are_in_one_error(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = output_of("kto --config-dir . --config-name mine export.path=file", capsys, monkeypatch)
    keys = "export.path trainer.devices model.optim.lr model.optim.learning_rate model.data.seq_len"
    assert [line.split()[0] for line in output.splitlines()[1:]] == keys.split()
