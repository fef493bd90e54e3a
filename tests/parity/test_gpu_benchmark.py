"""benchmarks/gpu.py on the CPU with tiny models: both trainers do the same work, and the numbers are consistent."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_models import SIZES, TOYS, make_rows, row_lengths
from benchmarks.gpu_tables import Contender, Figures, Found, goals, inconsistent, report
from tests.helpers.messages import Message

REPOSITORY = Path(__file__).resolve().parents[2]
SWAP, CACHED, ADAPTER = (f"nemo_kto, {mode}" for mode in ("swap", "cached", "adapter"))
TRL = "TRL, micro-batches of 8, sdpa"
PRECOMPUTED = f"{TRL}, reference precomputed"
# TRL 1.16 or another version, in a separate environment.
TRL_PYTHON = os.environ.get("NEMO_KTO_TEST_TRL_PYTHON", sys.executable)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("size", "names"),
    [
        pytest.param("llama-1b", [SWAP, CACHED, TRL, PRECOMPUTED], marks=pytest.mark.full),
        pytest.param("qwen-7b", [ADAPTER, CACHED, TRL, PRECOMPUTED], marks=pytest.mark.full),
    ],
)
def test_the_benchmark_on_a_toy_model(size: str, names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("trl")
    result = tmp_path / "result.json"
    words = ["--toy", "--steps", "1", "--size", size, "--result", str(result), "--trl-python", TRL_PYTHON]
    command = [sys.executable, "benchmarks/gpu.py", *words, *(word for name in names for word in ("--only", name))]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NEMO_KTO_FORCE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"| {name} | " in done.stdout for name in names)
    found = json.loads(result.read_text())[size]
    assert list(found["runs"]) == names
    tokens = sum(row_lengths(TOYS[size].rows, TOYS[size].longest))
    for name, (run,) in found["runs"].items():
        assert run["tokens"] == [tokens] * 2
        assert run["losses"][0] == pytest.approx(0.5, abs=1e-4)
        assert run["kls"][0] == pytest.approx(0.0, abs=1e-4)
        assert len(run["losses"]) == len(run["seconds"]) == 2
        for seconds, phases in zip(run["seconds"], run.get("phases", ()), strict=False):
            apart = sum(phases[phase] for phase in ("data", "reference", "kl", "forward_backward", "optimizer"))
            assert 0 < apart <= seconds
            assert (0 < phases.get("reference_swap", 0.0) < phases["reference"]) == (name == SWAP)


@pytest.mark.parametrize(("count", "padding"), [(4, 0.51), (8, 0.65)])
def test_padding_of_batches_in_random_order(count: int, padding: float) -> None:
    """The figures of docs/gpu: TRL's batches are padded to their longest row."""
    lengths, padded, draw = row_lengths(64, 4096), 0, random.Random(0)
    assert sum(lengths) == 32_453
    for _ in range(1000):
        draw.shuffle(lengths)
        padded += sum(count * max(lengths[start : start + count]) for start in range(0, len(lengths), count))
    assert 1 - 1000 * sum(lengths) / padded == pytest.approx(padding, abs=0.005)


def test_rows_are_as_long_as_those_of_real_data() -> None:
    size = SIZES["llama-1b"]
    lengths = row_lengths(size.rows, size.longest)
    assert (lengths[0], lengths[-1], len(lengths)) == (128, 4096, 64)
    assert 450 < sum(lengths) / 64 < 550
    assert lengths == sorted(lengths)
    rows = make_rows(size)
    assert sorted(len(row["prompt"]) + len(row["completion"]) + 1 for row in rows) == lengths
    longest_kl_example = max(len(row["prompt"]) for row in rows) + max(len(row["completion"]) for row in rows) + 1
    assert longest_kl_example == 4096, "no truncation, so that all trainers see the same tokens"


def run_of(seconds: float, *, loss: float = 0.5, tokens: int = 1000, peak: float = 10e9, **more: Any) -> dict[str, Any]:
    return {"seconds": [9.0, seconds], "tokens": [tokens] * 2, "losses": [loss] * 2, "peak_bytes": peak, **more}


def found_of(*, theirs: dict[str, Any]) -> Found:
    phases = {"data": 0.1, "reference": 0.5, "reference_swap": 0.04, "kl": 0.2, "forward_backward": 0.9, "optimizer": 0.2}
    mine = run_of(2.0, peak=5e9, flops=[1e15] * 2, peak_flops=1e15, engine=True, phases=[{}, phases])
    swap = Contender(name=SWAP, ours=True, evaluates=True), Figures(runs=[mine])
    trl = Contender(name=TRL, ours=False, evaluates=True), Figures(runs=[theirs])
    return Found(size=SIZES["llama-1b"], results=[swap, trl], tried=[trl])


def test_figures_against_manual_values() -> None:
    found = found_of(theirs=run_of(5.0))
    (mine, ours), (other, theirs) = found.results
    assert (ours.tokens_per_second, theirs.tokens_per_second) == (500, 200)
    assert (found.mfu(mine, ours), found.mfu(other, theirs)) == (0.5, 0.2)  # of the same work
    shares = ours.phase_shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert (shares["reference"], shares["reference_swap"], shares["rest"]) == pytest.approx((0.23, 0.02, 0.05))
    assert [value for value, _ in goals(found).values()] == pytest.approx([2.5, 0.5, 0.5, 0.02])
    assert inconsistent(found, tolerance=1e-4) == []
    text = "\n".join(report(found))
    assert f"| {SWAP} | 500 | 2.50 | 2.000 (2.000 to 2.000) | 50.0% | 5.00 GB | 0.50 |" in text
    assert "| swap of the weights | 2.0% |" in text
    assert "missed" not in text
    assert "Medians of 1 repetitions or more. Layers of Transformer Engine." in text


def test_other_load_is_detected() -> None:
    assert inconsistent(found_of(theirs=run_of(5.0, tokens=999)), tolerance=1e-4) == [
        Message(SWAP, "{1000}", "TRL", "8", "sdpa", "{999}")
    ]
    assert inconsistent(found_of(theirs=run_of(5.0, loss=0.501)), tolerance=1e-4) == [
        Message("first", "0.0001", SWAP, "0.5", "TRL", "8", "sdpa", "0.501")
    ]


def test_failed_and_successful_runs_are_reported() -> None:
    found = found_of(theirs=run_of(5.0))
    found.results[1][1].runs.clear()
    found.results[1][1].wrong = "torch.OutOfMemoryError: CUDA out of memory"
    text = "\n".join(report(found))
    assert f"| {TRL} | torch.OutOfMemoryError: CUDA out of memory | | | | | |" in text
    assert f"| {SWAP} | 500 |  | 2.000" in text
    assert inconsistent(found, tolerance=1e-4) == [f"{TRL}: torch.OutOfMemoryError: CUDA out of memory"]
