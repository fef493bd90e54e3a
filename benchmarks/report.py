"""Time and size of a report of a long run, whose log is made up.

    python benchmarks/report.py [--steps 100000]

The log has the metrics of a KTO run at each step, and a validation every thousand steps. For 100,000 steps
tests/unit/report/test_page.py checks the limits, 10 s and 3 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from nemo_kto.report.page import write_report
from nemo_kto.report.record import read_run

_TRAIN = (
    "loss kl_unclamped kl same_prompt_pairs rewards_chosen_mean logps_chosen_mean rewards_rejected_mean logps_rejected_mean"
)
_MORE = (
    "rewards_margin sft_loss preference_loss rewards_all_mean rewards_all_std rows invalid_rows lr skipped_steps grad_norm"
)
_OTHERS = "timing/data timing/reference timing/kl timing/forward_backward timing/optimizer timing/step_time timing/forward"
_PERF = "perf/tokens_per_sec perf/tokens_per_sec_per_rank perf/padding_fraction perf/kl_tokens_per_sec perf/peak_memory_gb"


def write_log(file: Path, *, steps: int) -> None:
    """Write a log, whose values repeat after a thousand steps."""
    draw = random.Random(0)  # nosec B311
    names = [*(f"train/{name}" for name in f"{_TRAIN} {_MORE}".split()), *f"{_OTHERS} {_PERF}".split()]
    values = [json.dumps({name: abs(draw.gauss(1, 0.3)) for name in names})[1:] for _ in range(1000)]
    with file.open("w") as log:
        for step in range(1, steps + 1):
            start = f'{{"step": {step}, "time": {1e9 + step}, '
            log.write(f"{start}{values[step % 1000]}\n")
            if step % 1000 == 0:
                held_out = {f"val/{name}": draw.gauss(1, 0.3) for name in f"{_TRAIN} {_MORE}".split()}
                log.write(start + json.dumps({**held_out, "val/auc": draw.random()})[1:] + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and size of a report of a long run.")
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        folder.mkdir()
        log = folder / "metrics.jsonl"
        write_log(log, steps=steps)
        began, cpu = time.perf_counter(), time.process_time()
        run = read_run(folder)
        read = time.perf_counter()
        page, _ = write_report([run], folder / "report.html")
        ended = time.perf_counter()
        print(f"log     {steps:,} steps, {log.stat().st_size / 1e6:.1f} MB")
        print(f"read    {read - began:.1f} s")
        print(f"drawn   {ended - read:.1f} s")
        print(f"total   {ended - began:.1f} s, {time.process_time() - cpu:.1f} s of CPU time")
        print(f"page    {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
