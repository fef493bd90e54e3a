"""A KTO run on a quantized base compared with the same run on the base as it is: rewards, log-probs, CPU seconds.

    python benchmarks/quantized_base.py MODEL [--steps 21] [--seeds 1 ...] [--only NAME ...]

MODEL is a Hugging Face folder. All runs train in fp32 on the CPU on 180 rows of the quickstart's ``thumbs.csv``, in the
same batches of 4; the other 20 rows are held out. fp8 must be named, as SmolLM2-135M is too narrow for its blocks.
Each run is a process of its own; values are those of one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = Path(__file__).resolve().parent.parent / "examples/quickstart/thumbs.csv"
LORA = ["model.peft.peft_scheme=lora", "lr=2e-4"]
RUNS = {
    "all weights": ["lr=2e-5"],
    "LoRA": LORA,
    **{f"LoRA, {form}": [*LORA, f"quantize={form}"] for form in ("nf4", "mxfp4", "fp8")},
}
COMMON = [
    "fields=prompt:question,response:answer,label:thumb", "template=true", "batch=4", "hardware=cpu", "trainer.precision=32",
    "model.data.seq_length=128", "trainer.kto.max_epochs=1", "trainer.kto.save_interval=0", "export.enabled=false",
    "export.report=false", "exp_manager.samples.count=0", "exp_manager.create_tensorboard_logger=false",
]  # fmt: skip
# Heading -> name of the metric, and whether it is of the first step; of the last one otherwise.
COLUMNS = {
    "log-prob up, step 1": ("train/logps_chosen_mean", True),
    "down": ("train/logps_rejected_mean", True),
    "held out: AUC": ("val/auc", False),
    "reward margin": ("val/rewards_margin", False),
    "log-prob up": ("val/logps_chosen_mean", False),
    "down ": ("val/logps_rejected_mean", False),
}


def train(model: Path, overrides: list[str], *, steps: int, seed: int) -> list[float]:
    """Return the values of the columns and the CPU seconds of a run."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"trainer.kto.max_steps={steps}", f"trainer.kto.val_check_interval={steps}", f"model.seed={seed}"]
        given += [f"exp_manager.explicit_log_dir={folder}/run", f"model.data.cache_dir={folder}/cache"]
        command = [sys.executable, "-m", "nemo_kto", "kto", str(model), str(ROWS), *COMMON, *given, *overrides]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=sys.stderr)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {is_first: {name: value for line in (lines[::-1] if is_first else lines) for name, value in line.items()}
             for is_first in (True, False)}  # fmt: skip
    return [*(found[is_first][name] for name, is_first in COLUMNS.values()), cpu]


def main() -> None:
    """Print the runs as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", choices=RUNS, action="append", help="run this one; may be given more than once")
    arguments = parser.parse_args()
    print("| | " + " | ".join([*map(str.strip, COLUMNS), "CPU seconds"]) + " |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    names = arguments.only or [name for name in RUNS if "fp8" not in name]
    for name, seed in itertools.product(names, arguments.seeds):
        values = train(arguments.model, RUNS[name], steps=arguments.steps, seed=seed)
        print(f"| {name}, seed {seed} | " + " | ".join(f"{value:.4g}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    main()
