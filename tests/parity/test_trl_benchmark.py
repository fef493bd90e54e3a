"""The benchmark against TRL runs, and both trainers compute the same."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import fork_server
from tests.helpers.messages import Message

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.parity


@pytest.mark.full  # a minute of separate processes; test_trl_kto_steps.py compares the same steps with TRL
def test_the_benchmark_table(tiny_checkpoint: Callable[..., Path]) -> None:
    pytest.importorskip("trl.experimental.kto", reason="TRL 1.5.1 is what is measured against")
    model = tiny_checkpoint("llama", max_position_embeddings=512)
    command = [
        sys.executable,
        str(REPOSITORY / "benchmarks" / "kto_vs_trl.py"),
        str(model),
        "--steps",
        "2",
        "--threads",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": fork_server.search_path(REPOSITORY)}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert printed.returncode == 0, printed.stderr
    rows = [line.strip("| ").split(" | ") for line in printed.stdout.splitlines() if line.startswith("| ")]
    header, *trainers = rows
    columns = "trainer | s / step | CPU s / step | times TRL's speed | matrix products | peak memory | of TRL's | loss | KL"
    assert header == columns.split(" | ")
    names = [trainer[0] for trainer in trainers]
    trl = f"TRL {importlib.metadata.version('trl')}"
    assert names == [
        f"{trl}, gradient checkpointing (its default)",
        f"{trl}, no gradient checkpointing",
        "nemo_kto, reference swapped",
        "nemo_kto, reference cached",
        "nemo_kto, LoRA",
        "nemo_kto, LoRA, reference cached",
    ]
    assert "fp32, 1 threads, medians of 2 steps" in printed.stdout
    assert re.search(r"A step with cached reference log-probs takes \d\.\d\d of a step that swaps", printed.stdout)
    for trainer in trainers[:4]:
        seconds, products, loss, kl = float(trainer[1]), float(trainer[4].rstrip("%")), float(trainer[7]), float(trainer[8])
        assert seconds > 0
        assert 0 < products < 100
        assert loss == pytest.approx(float(trainers[0][7]), abs=2e-6)
        assert kl == pytest.approx(float(trainers[0][8]), abs=2e-5)
        assert loss != 0.5, "the loss must change, or the comparison proves nothing"


def test_another_version_of_trl_needs_its_python() -> None:
    command = [sys.executable, "benchmarks/kto_vs_trl.py", "MODEL", "--only", "other TRL, no gradient checkpointing"]
    environment = {**os.environ, "PYTHONPATH": fork_server.search_path(REPOSITORY)}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, timeout=100)
    assert printed.returncode == 2
    assert printed.stderr.splitlines()[-1] == Message("kto_vs_trl.py", "error", "TRL", "--other-trl", "PYTHON")
