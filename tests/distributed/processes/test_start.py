"""Decisions at the start of a run: precision by hardware, and a warm-up that fits."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train

SLOW, FAST = "bf16 is slow here", "bf16 is fast here"
NO_WARMUP = "model.optim.sched.warmup_steps=0"


def started(native: list[bool], *arguments: Any) -> tuple[str, list[str], str]:
    """On a rank: a job on machines with and without bf16; its output, warnings and error."""
    from nemo_kto.device.precision import Bf16Support
    from nemo_kto.distributed import state
    from nemo_kto.run import lifecycle

    has = native[state.rank()]
    printed, warnings, error = io.StringIO(), io.StringIO(), ""
    handler = logging.StreamHandler(warnings)
    handler.addFilter(lambda record: not record.name.endswith(".data"))  # messages about rows are tested elsewhere
    logging.getLogger("nemo_kto").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(lifecycle, "bf16_support", lambda: Bf16Support(native=has, why=FAST if has else SLOW))
            train(*arguments)
    except ValueError as raised:
        error = str(raised)
    finally:
        logging.getLogger("nemo_kto").removeHandler(handler)
    return printed.getvalue(), warnings.getvalue().splitlines(), error


class Start:
    """One run folder, in which a job is started again and again, on this or that hardware."""

    def __init__(self, ranks: RankPool, model: Path, rows: Path, folder: Path) -> None:
        self.ranks, self.model, self.rows, self.folder = ranks, model, rows, folder

    def __call__(self, *native: bool, precision: str, steps: int, more: tuple[str, ...] = ()) -> list[Any]:
        overrides = [
            f"trainer.precision={precision}",
            f"trainer.kto.max_steps={steps}",
            "trainer.kto.limit_val_batches=0",
            NO_WARMUP,
        ]
        arguments = (list(native), self.model, self.rows, self.folder, len(native), [*overrides, *more])
        return self.ranks.run(len(native), started, *arguments)

    def saved(self) -> tuple[str, str]:
        """Precision in the saved configuration, and type of the weights in the newest checkpoint."""
        config = yaml.safe_load((self.folder / "config.yaml").read_text())
        newest = max((self.folder / "checkpoints").iterdir())
        return config["trainer"]["precision"], json.loads((newest / "trainer.json").read_text())["dtype"]


@pytest.fixture
def start(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> Start:
    return Start(ranks, tiny_llama, kto_rows, tmp_path)


def test_rank_0_decides_the_precision_and_a_resumed_run_keeps_it(start: Start) -> None:
    (first, _, error), (second, _, _) = start(True, False, precision="auto", steps=1)
    assert error == ""
    assert f"  precision   bf16 ({FAST})" in first.splitlines()
    assert "precision" not in second, "only rank 0 prints"
    assert start.saved() == ("bf16", "bfloat16")

    ((resumed, warnings, _),) = start(False, precision="auto", steps=2)
    assert Message("bf16") in resumed.splitlines()
    assert warnings == [Message("trainer.precision", "bf16", SLOW, "trainer.precision=32", "folder")]
    assert start.saved() == ("bf16", "bfloat16")

    before = (start.folder / "config.yaml").read_bytes()
    ((_, _, error),) = start(False, precision="32-true", steps=3)
    assert (start.folder / "config.yaml").read_bytes() == before, "a refused run leaves no files"
    assert error.splitlines()[1:] == [
        Message("trainer.precision", "bf16", "32"),
        Message("folder", "exp_manager.name", "exp_manager.explicit_log_dir"),
    ]


def test_a_run_in_fp32_stays_in_fp32_on_better_hardware(start: Start) -> None:
    ((printed, warnings, _),) = start(False, precision="auto", steps=1)
    assert f"  precision   32 ({SLOW})" in printed.splitlines()
    assert warnings == []
    assert start.saved() == ("32", "float32")
    ((printed, warnings, _),) = start(True, precision="auto", steps=2)
    assert Message("32", "checkpoint") in printed.splitlines()
    assert warnings == []
    assert start.saved() == ("32", "float32")


def test_a_warmup_longer_than_the_run_is_shortened(start: Start) -> None:
    length = ("trainer.kto.max_steps=-1", "trainer.kto.max_epochs=1")
    rate = ("name=LinearAnnealing", "warmup_steps=10", "min_lr=1e-5")
    more = (*length, "model.optim.lr=1e-3", *(f"model.optim.sched.{each}" for each in rate))
    ((_, warnings, error),) = start(False, precision="32-true", steps=1, more=more)
    assert error == ""
    assert warnings == [Message("model.optim.sched.warmup_steps", "6", "10", "5")]
    logged = map(json.loads, (start.folder / "metrics.jsonl").read_text().splitlines())
    rates = [row["train/lr"] for row in logged if "train/lr" in row]
    assert rates == pytest.approx([*(1e-3 * step / 5 for step in range(1, 6)), 1e-5])
