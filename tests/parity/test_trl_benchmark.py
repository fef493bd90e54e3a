"""The benchmark against TRL still runs, and in it both trainers still compute the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.parity


@pytest.mark.full  # a minute of processes of their own; test_trl_step.py holds the same steps against TRL
def test_the_table(tiny_checkpoint: Callable[..., Path]) -> None:
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
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert printed.returncode == 0, printed.stderr
    rows = [line.strip("| ").split(" | ") for line in printed.stdout.splitlines() if line.startswith("| ")]
    header, *trainers = rows
    assert header == "trainer | s / step | CPU s / step | times TRL's speed | peak memory | of TRL's | loss | KL".split(
        " | "
    )
    names = [trainer[0] for trainer in trainers]
    assert names[2:] == [
        "nemo_kto, reference swapped",
        "nemo_kto, reference cached",
        "nemo_kto, LoRA",
        "nemo_kto, LoRA, reference cached",
    ]
    assert re.search(r"A step with cached reference log-probs takes \d\.\d\d of a step that swaps", printed.stdout)
    for trainer in trainers[:4]:
        seconds, loss, kl = float(trainer[1]), float(trainer[6]), float(trainer[7])
        assert seconds > 0
        assert loss == pytest.approx(float(trainers[0][6]), abs=2e-6)
        assert kl == pytest.approx(float(trainers[0][7]), abs=2e-5)
        assert loss != 0.5, "nothing was learnt, so nothing was compared"
