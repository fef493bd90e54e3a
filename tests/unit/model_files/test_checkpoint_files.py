"""Choice of the newest undamaged checkpoint from files alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nemo_kto.checkpoint.manager import newest_checkpoint, verify
from nemo_kto.errors import UserError
from nemo_kto.model_files import checkpoint_files
from nemo_kto.model_files.checkpoint_files import check_checkpoint, hash_file, info_text
from tests.helpers.messages import Message, raises

FILES = {
    "state/__0_0.distcp": bytes(range(256)) * 40,
    "state/.metadata": b"where the tensors are",
    "rng/00000.pt": b"generators",
    "hf/config.json": b"{}",
    "hf/tokenizer.json": b'{"version": "1.0"}',
}


def make_checkpoint(folder: Path, step: int, *, metrics: dict[str, float] | None = None) -> Path:
    checkpoint = folder / f"step_{step:06d}"
    for name, content in FILES.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    info = {
        "trainer": {"step": step},
        "metrics": metrics or {},
        "dtype": "float32",
        "layout": {"world": 1, "tensor": 1, "pipeline": 1},
        "run": {},
        "files": {name: hash_file(checkpoint / name)._asdict() for name in FILES},
    }
    (checkpoint / "trainer.json").write_text(info_text(info))
    return checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of three checkpoints."""
    for step in (2, 4, 6):
        make_checkpoint(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def flip(file: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((checkpoint / "trainer.json").read_text())
    change(info)
    (checkpoint / "trainer.json").write_text(json.dumps(info))


def write_without_files(checkpoint: Path) -> None:
    info = json.loads((checkpoint / "trainer.json").read_text())
    (checkpoint / "trainer.json").write_text(info_text({name: info[name] for name in info if name != "files"}))


def replace_by_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a bit of the state": (lambda path: flip(path / "state/__0_0.distcp"), ["state/__0_0.distcp"]),
    "a bit of the tokenizer": (lambda path: flip(path / "hf/tokenizer.json"), ["hf/tokenizer.json"]),
    "a missing folder": (lambda path: shutil.rmtree(path / "hf"), ["hf/config.json"]),
    "a file cut short": (lambda path: (path / "state/.metadata").write_bytes(b"where"), ["state/.metadata", "5", "21"]),
    "a fifo": (lambda path: replace_by_fifo(path / "hf/config.json"), ["hf/config.json", "file"]),
    "no trainer.json": (lambda path: (path / "trainer.json").unlink(), ["trainer.json"]),
    "half a trainer.json": (lambda path: (path / "trainer.json").write_text('{"tra'), ["trainer.json", "JSON"]),
    "another step": (lambda path: edit(path, lambda info: info["trainer"].update(step=5)), ["trainer.json", "changed"]),
    "no files": (write_without_files, ["trainer.json", "files", "missing"]),
    "a file where the folder was": (lambda path: [shutil.rmtree(path), path.write_text("")], ["trainer.json"]),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damages, names = DAMAGES[case]
    damages(folder / "step_000006")
    newest = newest_checkpoint(folder)
    assert newest is not None
    assert newest.step == 4
    assert [record.getMessage() for record in caplog.records] == [Message(f"{folder}/step_000006", "damaged", *names)]


def test_a_complete_checkpoint_is_used_without_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = newest_checkpoint(folder)
    assert newest is not None
    assert (newest.step, newest.info["trainer"]) == (6, {"step": 6})
    assert not caplog.records
    assert newest_checkpoint(folder / "elsewhere") is None


def test_when_all_are_damaged_no_run_starts_over(folder: Path) -> None:
    for step, name in ((2, "state/.metadata"), (4, "rng/00000.pt"), (6, "hf/tokenizer.json")):
        flip(folder / f"step_{step:06d}" / name)
    damaged = ("step_000006: hf/tokenizer.json", "step_000004: rng/00000.pt", "step_000002: state/.metadata")
    with raises(UserError, f"{folder}", *damaged, "remove"):
        newest_checkpoint(folder)


@pytest.mark.parametrize(("code", "is_damage"), [(errno.EACCES, False), (errno.ESTALE, False), (errno.EIO, True)])
def test_a_missing_permission_is_not_reported_as_damage(code: int, is_damage: bool, folder: Path) -> None:
    """Root may read everything, so that the refusal is made up."""

    def refused(file: Path) -> object:
        if file == folder / "step_000006/state/__0_0.distcp":
            raise OSError(code, os.strerror(code))
        return hash_file(file)

    with mock.patch.object(checkpoint_files, "hash_file", refused):
        if is_damage:
            newest = newest_checkpoint(folder)
            assert newest is not None
            assert newest.step == 4
            return
        with raises(UserError, f"{folder}/step_000006/state/__0_0.distcp", os.strerror(code), "permission"):
            newest_checkpoint(folder)


def test_only_the_needed_files_are_read(folder: Path) -> None:
    checkpoint = folder / "step_000006"
    flip(checkpoint / "rng/00000.pt")
    verify(checkpoint, ("state", "hf"))
    flip(checkpoint / "hf/tokenizer.json")
    for refuses in (lambda: verify(checkpoint, ("state", "hf")), lambda: check_checkpoint(checkpoint)):
        with raises(UserError, f"{checkpoint}", "hf/tokenizer.json", "checkpoint"):
            refuses()


def test_the_base_model_of_adapters_may_be_edited(folder: Path) -> None:
    adapters = {"settings": {"rank": 2, "alpha": 4.0}, "base_model": "/models/old"}
    checkpoint = folder / "step_000006"
    info = json.loads((checkpoint / "trainer.json").read_text()) | {"adapters": adapters}
    (checkpoint / "trainer.json").write_text(info_text(info))
    edit(checkpoint, lambda info: info["adapters"].update(base_model="/models/new"))
    assert check_checkpoint(checkpoint) == Path("/models/new")
    edit(checkpoint, lambda info: info["adapters"]["settings"].update(rank=3))
    with raises(UserError, "trainer.json"):
        check_checkpoint(checkpoint)
