"""Impossible values in trainer.json are refused by name, even with correct hashes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.algorithms.duration import BestValidation, EarlyStopping
from nemo_kto.checkpoint.manager import newest_checkpoint
from nemo_kto.checkpoint.safe_loading import read_errors
from nemo_kto.checkpoint.sharded_state import adapters_in
from nemo_kto.cli.checkpoint_command import ls, verify
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import (
    Checkpoint,
    DamagedCheckpoint,
    check_checkpoint,
    damage,
    info_text,
    rank_by,
    read_checkpoint,
)
from nemo_kto.run.resume import differences
from tests.helpers.messages import assert_names
from tests.unit.algorithms.trainer_doubles import Run
from tests.unit.model_files.test_checkpoint_files import make_checkpoint

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
    ls([str(found.folder.parent.parent)])
    verify([str(found.folder)])


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
