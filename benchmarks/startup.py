"""How long a job takes from the command to its first step: a tiny model, one rank on the CPU, a fresh process each time.

    python benchmarks/startup.py [--tree PATH] [--repeats 5]

PATH is another checkout, so that two can be compared. The files of the operating system's cache are warm: the first run is
not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
IMPORTS = "import time, nemo_kto.cli.main, nemo_kto.run.build; print(time.time())"
# The imports do not count as composing, so they come first.
COMPOSING = """
import sys, time
import hydra
from nemo_kto.config import compose
began = time.perf_counter()
compose.to_config(compose.load(sys.argv[1:]))
print(time.perf_counter() - began)
"""


def run(tree: Path, *arguments: str) -> str:
    """What a Python process printed. Raises CalledProcessError if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout


def overrides(scratch: Path, folder: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={scratch / 'model'}",
        f"model.data.data_prefix={scratch / 'kto.jsonl'}",
        f"model.data.cache_dir={scratch / 'cache'}",
        "model.data.splits_string='100,0,0'",
        "model.global_batch_size=4",
        "model.micro_batch_size=2",
        "trainer.devices=1",
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        "trainer.kto.max_steps=1",
        "trainer.kto.limit_val_batches=0",
        f"exp_manager.explicit_log_dir={folder}",
    ]


def first_step(tree: Path, scratch: Path, number: int) -> float:
    """Seconds from the command to the first line of metrics."""
    folder = scratch / f"run{number}"
    began = time.time()
    run(tree, "-m", "nemo_kto.cli.main", "kto", *overrides(scratch, folder))
    return float(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["time"]) - began


def imports(tree: Path) -> float:
    """Seconds from the start of a process until everything that a job needs is imported."""
    began = time.time()
    return float(run(tree, "-c", IMPORTS)) - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a job takes to start.")
    parser.add_argument("--tree", type=Path, default=HERE, help="checkout to measure; this one if not given")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each figure")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        run(HERE, "-m", "tests.helpers.tiny_models", str(scratch))
        first_step(tree, scratch, 0)
        numbers = range(1, arguments.repeats + 1)
        figures = {
            "command to first step": [first_step(tree, scratch, number) for number in numbers],
            "imports": [imports(tree) for _ in numbers],
            "composing the configuration": [
                float(run(tree, "-c", COMPOSING, *overrides(scratch, scratch / "none"))) for _ in numbers
            ],
        }
    for title, seconds in figures.items():
        print(f"{title}: {statistics.median(seconds):.2f} s (median of {len(seconds)})")


if __name__ == "__main__":
    main()
