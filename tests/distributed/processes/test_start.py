"""The precision of a run: chosen by rank 0 for its hardware, and kept by a resumed run."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_kto.device.precision import Bf16Support
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import info_text
from nemo_kto.run import prepare
from tests.helpers.messages import Message, raises
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import resolved, train
from tests.unit.model_files.test_checkpoint_files import make_checkpoint

SLOW, FAST = "bf16 is slow here", "bf16 is fast here"


def support(has: bool) -> Bf16Support:
    return Bf16Support(native=has, why=FAST if has else SLOW)


def started(*arguments: Any) -> str:
    """Output of a rank of a job, where only rank 0 has bf16."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(prepare, "bf16_support", lambda: support(state.rank() == 0))
        train(*arguments)
    return printed.getvalue()


def test_rank_0_decides_the_precision(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    short = ["trainer.precision=auto", "trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=0"]
    first, second = ranks.run(2, started, tiny_llama, kto_rows, tmp_path, 2, short)
    assert f"  precision   bf16 ({FAST})" in first.splitlines()
    assert "precision" not in second, "only rank 0 prints"
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["precision"] == "bf16"
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert json.loads((checkpoint / "trainer.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "native", "precision"),
    [(None, True, "bf16"), (None, False, "32"), ("bfloat16", False, "bf16"), ("float32", True, "32")],
)
def test_a_resumed_run_keeps_its_precision(
    dtype: str | None,
    native: bool,
    precision: str,
    tiny_llama: Path,
    kto_rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if dtype is not None:
        file = make_checkpoint(tmp_path / "checkpoints", 1) / "trainer.json"
        file.write_text(info_text({**json.loads(file.read_text()), "dtype": dtype}))
    monkeypatch.setattr(prepare, "bf16_support", lambda: support(native))
    run = prepare.agree_between_ranks(resolved(tiny_llama, kto_rows, tmp_path, 1, ["trainer.precision=auto"]))
    assert run.cfg.trainer.precision == precision
    warning = Message("trainer.precision", "bf16", SLOW, "trainer.precision=32", "folder")
    assert caplog.messages == [warning] * ((precision, native) == ("bf16", False))


@pytest.mark.parametrize(("given", "saved"), [("bf16", None), ("bf16-mixed", None), ("auto", "bfloat16")])
def test_bf16_on_a_cpu_that_is_too_slow(
    given: str, saved: str | None, tiny_llama: Path, kto_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a run that is resumed from another machine, unless it is forced."""
    if saved is not None:
        file = make_checkpoint(tmp_path / "checkpoints", 1) / "trainer.json"
        file.write_text(info_text({**json.loads(file.read_text()), "dtype": saved}))
    monkeypatch.setattr(prepare, "bf16_support", lambda: replace(support(False), too_slow=True))

    def resolve(precision: str) -> str:
        run = resolved(tiny_llama, kto_rows, tmp_path, 1, [f"trainer.precision={precision}"])
        return str(prepare.agree_between_ranks(run).cfg.trainer.precision)

    remedy = "trainer.precision=32" if saved else "auto or 32"
    with raises(UserError, "trainer.precision", "10 times", "bf16", SLOW, remedy, "trainer.precision=bf16-forced"):
        resolve(given)
    assert (resolve("bf16-forced"), resolve("32")) == ("bf16", "32")
