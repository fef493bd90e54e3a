"""The planned memory of a GPU, compared with the measured peak of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device import device
from nemo_kto.planner.memory import CONTEXT
from tests.helpers.tiny_models import make_checkpoint, make_rows, write_rows
from tests.helpers.training_jobs import train

pytestmark = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU")


def test_a_run_uses_the_planned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_kto.planner import plan_run

    plans = []

    def planned(run: ResolvedRun, machines: plan_run.Machines, *, longest: int | None = None) -> None:
        plans.append(plan_run.make_plan(run, machines))

    monkeypatch.setattr("nemo_kto.run.build.check_memory", planned)
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32768}
    model = make_checkpoint(tmp_path / "model", "llama", **sizes)
    rows = write_rows(tmp_path / "rows.jsonl", [{**row, "response": "a" * 4096} for row in make_rows(16)])
    overrides = ["trainer.accelerator=gpu", "trainer.precision=bf16", "model.data.seq_length=2048"]
    overrides += ["model.global_batch_size=8", "model.micro_batch_size=4", f"model.data.cache_dir={tmp_path / 'cache'}"]
    overrides += ["model.reference.mode=cached"]
    train(model, rows, tmp_path / "run", 1, overrides)
    plan = plans[0]
    assert device.peak_memory_bytes() == pytest.approx(plan.largest.device - CONTEXT, rel=0.15)
