"""A KTO step on one GPU, with nemo_kto and with TRL's KTOTrainer: tokens a second, MFU, memory, and where the time goes.

    python benchmarks/gpu.py [--size llama-1b] [--repetitions 2] [--minutes 14] [--trl-python PYTHON] [--result FILE.json]
    python benchmarks/gpu.py --toy      tiny models, on the CPU too: a test of this program, whose times mean nothing

Two models with random weights: one of Llama-3.2-1B's shape, all of whose weights are trained, and one of Qwen2.5-7B's, of
which LoRA's adapters are. A global batch is 64 rows with lengths as in real preference data (gpu_models.py), the same in
every step. Both trainers get the same rows, train in bf16 with fp32 main weights of what is trained, and count the tokens of
samples and KL examples.

TRL is tried with some micro-batches, with and without gradient checkpointing, with liger's kernels where they are installed,
and compared at what was fastest; with its reference evaluated in each step, and precomputed. nemo_kto runs at its defaults.
Every run is a process of its own, and repetitions are interleaved. The first step of a run is not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # of tests/helpers/tiny_models.py, which makes the tokenizer

from benchmarks import gpu_models  # noqa: E402
from benchmarks.gpu_models import SIZES, TOYS, Size  # noqa: E402
from benchmarks.gpu_tables import Contender, Figures, Found, goals, inconsistent, report  # noqa: E402

BETA, LR = 0.1, 1e-6
GRACE = 60  # seconds that a run may take longer than expected


def ours(size: Size) -> list[Contender]:
    """nemo_kto, with each way to hold the reference."""
    live = "adapter" if size.lora else "swap"
    modes = {live: True, "cached": False}
    return [
        Contender(name=f"nemo_kto, {mode}", ours=True, evaluates=evaluates, settings={"reference": mode, "overrides": []})
        for mode, evaluates in modes.items()
    ]


def trl(size: Size, *, toy: bool, version: tuple[int, ...] | None) -> list[Contender]:
    """TRL at the settings that are tried; the reference is evaluated in each step. None where there is no TRL."""
    if version is None:
        return []
    dtype = "bfloat16" if size.lora and not toy else "float32"  # its mixed precision: fp32 main weights of what is trained
    tried = [(2, False), (8, True)] if size.lora else [(4, False), (8, False), (16, True)]
    variants = [(*pair, "sdpa", False) for pair in tried]
    if toy:
        variants = [(size.rows, False, "sdpa", False)]
    elif importlib.util.find_spec("flash_attn"):
        variants = [(*pair, "flash_attention_2", False) for pair in tried] + variants[:1]
    if importlib.util.find_spec("liger_kernel") and version >= (1, 16) and not toy:
        variants.append((*variants[0][:3], True))
    return [
        Contender(
            name=f"TRL, micro-batches of {rows}, {attention}{', recomputed' * recomputed}{', liger' * liger}",
            ours=False,
            evaluates=True,
            settings={
                "dtype": dtype,
                "batch_size": rows,
                "gradient_checkpointing": recomputed,
                "attention": attention,
                "liger": liger,
                "precompute": False,
            },
        )
        for rows, recomputed, attention, liger in variants
    ]


def precomputed(best: Contender) -> Contender:
    """The same with the reference's log-probs computed before."""
    settings = {**best.settings, "precompute": True}
    return Contender(name=f"{best.name}, reference precomputed", ours=False, evaluates=False, settings=settings)


@dataclass(kw_only=True)
class Bench:
    """Runs contenders on one model, until the time is up.

    Attributes:
        folder: of the model, the rows and the runs.
        trl_python: the interpreter that has TRL.
        deadline: by time.monotonic(); a run that would end after it is not begun.
    """

    size: Size
    folder: Path
    trl_python: str
    deadline: float
    took: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = gpu_models.write_model(self.size, self.folder / "model")
        self.rows = gpu_models.write_rows(gpu_models.make_rows(self.size), self.folder / "rows.jsonl")

    def has_time_for(self, contender: Contender) -> bool:
        """Whether a run would end in time, by the last one of its trainer."""
        return time.monotonic() + self.took.get(contender.name.split(",")[0], 0.0) < self.deadline

    def run(self, contender: Contender, figures: Figures, *, steps: int) -> None:
        """One run in a process of its own; what goes wrong is noted, and the others go on."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            shared = {
                "model": str(self.model),
                "rows": str(self.rows),
                "folder": folder,
                "steps": steps + 1,
                "longest": self.size.longest,
                "rows_of_a_step": self.size.rows,
                "lora": self.size.lora,
                "beta": BETA,
                "lr": LR,
                "dtype": self.size.dtype,
            }
            given, result = Path(folder) / "settings.json", Path(folder) / "result.json"
            given.write_text(json.dumps(shared | contender.settings))
            python, program = (sys.executable, "gpu_ours.py") if contender.ours else (self.trl_python, "gpu_trl.py")
            command = [python, "-W", "ignore", str(HERE / program), str(given), str(result)]
            figures.wrong = self._wrong_of(command)
            if figures.wrong is None:
                figures.runs.append(json.loads(result.read_text()))
        self.took[contender.name.split(",")[0]] = time.monotonic() - began
        said = figures.wrong or f"{figures.runs[-1]['seconds'][-1]:.2f} s a step"
        print(f"{contender.name}: {said}", file=sys.stderr, flush=True)

    def _wrong_of(self, command: list[str]) -> str | None:
        """Run it; in a line what went wrong, if anything did."""
        seconds = self.deadline + GRACE - time.monotonic()
        try:
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "had not ended when the time was up"
        if done.returncode == 0:
            return None
        said = [line for line in done.stderr.splitlines() if line.strip()]
        print("\n".join(said[-40:]), file=sys.stderr)
        return (said or [f"status {done.returncode}"])[-1][:300]


def environment() -> dict[str, str]:
    """Of the runs: quiet, without a network, and with this checkout's package."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **quiet, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def measure(
    bench: Bench, *, repetitions: int, steps: int, toy: bool, version: tuple[int, ...] | None, only: Sequence[str] | None
) -> Found:
    """Find TRL's best settings, then run all, or ``only`` those of these names, in turn."""
    tried = [(contender, Figures()) for contender in trl(bench.size, toy=toy, version=version)]
    for contender, figures in tried if len(tried) > 1 and not only else ():
        if bench.has_time_for(contender):
            bench.run(contender, figures, steps=1)
    contenders = ours(bench.size)
    if tried:
        best, _ = min(tried, key=lambda pair: pair[1].seconds if pair[1].runs else math.inf)
        contenders += [best, precomputed(best)]
    results = [(contender, Figures()) for contender in contenders if not only or contender.name in only]
    for _ in range(repetitions):
        for contender, figures in results:
            if figures.wrong is None and bench.has_time_for(contender):
                bench.run(contender, figures, steps=steps)
    return Found(size=bench.size, results=results, tried=tried)


def version_of_trl(python: str) -> tuple[int, ...] | None:
    """Of this interpreter; None where it has none."""
    asked = "from importlib.metadata import version; print(version('trl'))"
    done = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    return tuple(int(part) for part in done.stdout.strip().split(".")[:2]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="measure this one; may be given more than once")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="steps of a run that are measured, after one that is not")
    parser.add_argument("--minutes", type=float, default=14.0, help="no run begins that would end later")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter that has the TRL to compare with")
    parser.add_argument(
        "--result", type=Path, help="file for the tables (Markdown, .md) or for all figures (.json)", action="append"
    )
    parser.add_argument("--only", action="append", help="run the contender of this name; may be given more than once")
    parser.add_argument("--toy", action="store_true", help="tiny models and one repetition")
    arguments = parser.parse_args()
    version = version_of_trl(arguments.trl_python)
    names, began = arguments.size or list(SIZES), time.monotonic()
    text = [] if version else ["There is no TRL to compare with.", ""]
    wrong, figures = list[str](), {}
    for number, name in enumerate(names, start=1):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(
                size=(TOYS if arguments.toy else SIZES)[name],
                folder=Path(folder),
                trl_python=arguments.trl_python,
                deadline=began + 60 * arguments.minutes * number / len(names),
            )
            repetitions = 1 if arguments.toy else arguments.repetitions
            shared = {"repetitions": repetitions, "steps": arguments.steps, "toy": arguments.toy, "only": arguments.only}
            found = measure(bench, version=version, **shared)
        text += [*report(found), ""]
        wrong += inconsistent(found, tolerance=1e-4 if arguments.toy else 1e-2)
        figures[name] = {"goals": goals(found), "runs": {one.name: of_one.runs for one, of_one in found.results}}
        for file in arguments.result or ():  # now, should the next model be interrupted
            file.write_text(json.dumps(figures) if file.suffix == ".json" else "\n".join(text))
    print("\n".join(text))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
