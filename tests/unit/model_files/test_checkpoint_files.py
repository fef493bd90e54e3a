"""Choice of the newest undamaged checkpoint from files alone; impossible values in trainer.json are refused by name."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nemo_kto.algorithms.duration import BestValidation, EarlyStopping
from nemo_kto.checkpoint.manager import newest_checkpoint, verify
from nemo_kto.checkpoint.safe_loading import read_errors
from nemo_kto.checkpoint.sharded_state import adapters_in
from nemo_kto.cli import checkpoint_command
from nemo_kto.errors import UserError
from nemo_kto.model_files import checkpoint_files
from nemo_kto.model_files.checkpoint_files import (
    Checkpoint,
    DamagedCheckpoint,
    check_checkpoint,
    damage,
    hash_file,
    info_text,
    is_reliable,
    rank_by,
    read_checkpoint,
)
from nemo_kto.run.resume import differences
from tests.helpers.messages import Message, assert_names, raises
from tests.unit.algorithms.trainer_doubles import Run

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


STEP, BATCH = 4, 2
RUN = {
    "algorithm": "kto",
    "pretrained_checkpoint.restore_from_path": {"sha256": "0" * 64, "from": "/model"},
    "model.reference.sync_interval": 0,
    "trainer.kto.limit_train_batches": 10,
    "model.peft.lora_tuning.target_modules": ["q_proj"],
}
UNLOGGED = {"steps": 1, "seconds": 0.5, "sums": {"loss": 1.0}, "totals": {"train/loss": [0.5, 1]}, "newest": {"lr": 0.1}}
STOPPING = {"monitor": "val_loss", "mode": "min", "best": 0.5, "best_step": 2, "waited": 1, "is_finite": True}
INFO: dict[str, Any] = {
    "trainer": {
        "step": STEP, "epoch": 0, "consumed_samples": STEP * BATCH, "steps_per_epoch": 10, "skipped_steps": 0,
        "skipped_in_a_row": 0, "validation_due": 0, "unlogged": UNLOGGED, "objective": {"steps": 1.0},
        "early_stopping": STOPPING, "best_validation": STOPPING,
    },
    "metrics": {"val_loss": 0.5, "train_loss": 0.4},
    "dtype": "float32",
    "adapters": {
        "base_model": "/model",
        "settings": {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj"], "dropout": 0.0, "layers": None},
    },
    "moving_reference": False,
    "run": RUN,
    "versions": {"torch": "2.13.0"},
    "layout": {"world": 1, "tensor": 1, "pipeline": 1, "context": 1},
    "distributed_optimizer": False,
}  # fmt: skip
NESTED: Any = None
for _ in range(5000):
    NESTED = [NESTED]
NUMBERS = (-1, 10**400, 1.5, float("nan"), float("inf"))
VALUES: tuple[Any, ...] = (None, True, *NUMBERS, "x", [], [[1]], {}, {"a": {"b": []}}, NESTED)


def places(value: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The ways to everything in a JSON value."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*at, name)
        yield from places(inner, (*at, name))


def write(checkpoint: Path, info: dict[str, Any]) -> None:
    """Write the file with correct hashes, as an attacker would."""
    (checkpoint / "trainer.json").write_text(info_text(info))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    made = make_checkpoint(tmp_path / "checkpoints", STEP)
    files = json.loads((made / "trainer.json").read_text())["files"]
    write(made, {**INFO, "files": files})
    return made


def use(found: Checkpoint) -> None:
    """All that a resumed run, a listing and an export do with the values of a trainer.json."""
    rank_by(found, "val_loss", "min")
    with read_errors(found.folder / "trainer.json"):
        differences(found.info["run"], RUN)
    adapters_in(found.info)
    stopping = EarlyStopping(monitor="val_loss", mode="min", min_delta=0.0, patience=3)
    stopping.load_state_dict(found.info["trainer"].get("early_stopping", {}))
    str(stopping.reason)
    best = BestValidation(monitor="val_loss", mode="min")
    with read_errors(found.folder / "trainer.json"):
        run = Run(rows=20, batch=BATCH, early_stopping=stopping, best_validation=best)
        run.trainer.load_state_dict(found.info["trainer"])
    checkpoint_command.ls([str(found.folder.parent.parent)])
    checkpoint_command.verify([str(found.folder)])


def errors_of(checkpoint: Path) -> str | None:
    """The error of using a checkpoint; any other type of error is a bug."""
    try:
        use(read_checkpoint(checkpoint))
    except (DamagedCheckpoint, UserError) as error:
        return str(error)
    return None


def test_saved_values_are_accepted(checkpoint: Path) -> None:
    assert errors_of(checkpoint) is None


@pytest.mark.parametrize("place", list(places(INFO)), ids=lambda place: ".".join(map(str, place)))
def test_any_other_value_is_refused_or_accepted(place: tuple[str | int, ...], checkpoint: Path) -> None:
    info = json.loads((checkpoint / "trainer.json").read_text())
    *way, last = place
    for value in ("absent", *VALUES):
        changed = copy.deepcopy(info)
        inner: Any = changed
        for name in way:
            inner = inner[name]
        if value == "absent":
            del inner[last]
        else:
            inner[last] = value
        try:
            write(checkpoint, changed)
        except (RecursionError, ValueError):  # cannot be written as JSON at all
            continue
        if (refusal := errors_of(checkpoint)) is not None:
            assert_names(refusal, "trainer.json")
            assert len(refusal) < 1000


WRONG: dict[str, tuple[tuple[str, ...], object]] = {
    "a negative step": (("trainer", "step"), -1),
    "the step of another": (("trainer", "step"), STEP + 2),
    "a step that is a float": (("trainer", "step"), 4.0),
    "a step that is true": (("trainer", "step"), True),
    "examples of other batches": (("trainer", "consumed_samples"), STEP * BATCH + 1),
    "negative examples": (("trainer", "consumed_samples"), -8),
    "an epoch that is no number": (("trainer", "epoch"), float("nan")),
    "a negative count": (("trainer", "unlogged", "steps"), -1),
    "a metric that is a string": (("metrics", "val_loss"), "low"),
    "a layout of nobody": (("layout", "world"), 0),
    "another dtype": (("dtype",), "float8"),
    "adapters of nothing": (("adapters", "settings"), {}),
    "a run that is a list": (("run",), []),
}


@pytest.mark.parametrize("case", WRONG)
def test_impossible_values_are_named(case: str, checkpoint: Path) -> None:
    (*way, last), value = WRONG[case]
    info = json.loads((checkpoint / "trainer.json").read_text())
    inner = info
    for name in way:
        inner = inner[name]
    inner[last] = value
    write(checkpoint, info)
    with pytest.raises(DamagedCheckpoint) as error:
        read_checkpoint(checkpoint)
    named = ".".join([*way, last]) if way[:1] == ["trainer"] else (*way, last)[0]  # objects of one kind are named as a whole
    assert_names(error.value, "trainer.json", named, repr(value))


@pytest.mark.parametrize("name", ["/etc/hostname", "../../secret", "state/../../secret", "a" * 5000, "a\0b", "\ud800"])
def test_file_names_cannot_leave_the_folder(name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint.parent.parent / "secret").write_text("secret")
    info = json.loads((checkpoint / "trainer.json").read_text())
    info["files"][name] = {"size": 6, "sha256": "0" * 64}
    write(checkpoint, info)
    with pytest.raises(DamagedCheckpoint) as error:
        damage(checkpoint, read_checkpoint(checkpoint).files)
    if "secret" in name or "etc" in name:
        assert_names(error.value, "trainer.json", name, "outside")
    with pytest.raises(UserError) as refused:
        newest_checkpoint(checkpoint.parent)
    assert_names(refused.value, checkpoint.name)
    with pytest.raises(UserError):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("monitor", "enough"), [("val_a_loss", False), ("val_a_b_loss", True), ("val_c_loss", True), ("train_loss", True)]
)
def test_the_rows_of_a_metric_are_those_of_its_set(tmp_path: Path, monitor: str, enough: bool) -> None:
    folder = make_checkpoint(tmp_path, 2, metrics={"val_a_rows": 5.0, "val_a_b_rows": 20.0})
    assert is_reliable(read_checkpoint(folder), monitor) is enough
