"""One KTO step compared with TRL's KTOTrainer: seconds, memory, and a check that all computed the same.

    python benchmarks/kto_vs_trl.py MODEL [--rows ROWS.jsonl] [--tokens 384] [--steps 3] [--rounds 1] [--threads 2]
                                    [--only NAME ...] [--other-trl PYTHON]

MODEL is a Hugging Face folder. All train it in fp32 on the CPU with the same number of threads, on the same 8 examples
of up to 384 tokens with the same KL examples, constant learning rate, Adam and clipping. Each trainer runs in a
separate process, one after the other, and again in each round; the medians are over all rounds. The first step of a
process is not measured, and one more step is profiled: the share of matrix products is of the time of its operators. The
table shows loss and KL of the last step: if they agree, all computed the same steps. nemo_kto runs with three reference
modes; with adapters fewer weights are trained, so that losses differ. Runs of TRL with adapters must be named; nf4
needs bitsandbytes. Their adapters are in fp32, as the bf16 of TRL takes many times as long on CPUs without bf16 products.

TRL is the one that is installed here. PYTHON is that of an environment with another version, which takes turns with it:

    python3 -m venv OTHER && OTHER/bin/pip install torch==2.13.0 transformers==5.23.0 datasets trl==1.5.1
    python benchmarks/kto_vs_trl.py MODEL --other-trl OTHER/bin/python

Speeds are compared by CPU seconds, which other work on the machine changes less.

ROWS.jsonl holds {"prompt": str, "completion": str, "label": bool}; without it rows of random words are generated,
the same every time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NUM_ROWS, MAX_TOKENS = 8, 384
PROMPT_TOKENS, RESPONSE_TOKENS = (32, 128), (64, 256)  # any prompt with any response fits into MAX_TOKENS
OPTIMIZER: dict[str, Any] = {
    "learning_rate": 1e-6,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
BETA = 0.1
LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.target_modules=[all]",
    "model.peft.lora_tuning.adapter_dim=16",
]
OURS = {
    "nemo_kto, reference swapped": ["model.reference.mode=swap"],
    "nemo_kto, reference cached": ["model.reference.mode=cached"],
    "nemo_kto, LoRA": [*LORA, "model.reference.mode=adapter"],
    "nemo_kto, LoRA, reference cached": [*LORA, "model.reference.mode=cached"],
    "nemo_kto, LoRA, nf4": [*LORA, "model.reference.mode=adapter", "model.quantize=nf4"],
}
# Name of a run of TRL -> whether it uses gradient checkpointing, adapters and bitsandbytes.
TRL: dict[str, dict[str, bool]] = {
    "TRL, gradient checkpointing (its default)": {"gradient_checkpointing": True},
    "TRL, no gradient checkpointing": {},
    "TRL, LoRA": {"lora": True},
    "TRL, LoRA, nf4": {"lora": True, "nf4": True},
}
OTHER = "other "
RUNS = [*TRL, *(OTHER + name for name in TRL), *OURS]
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")


@dataclass
class Clock:
    """Wall and CPU seconds of the measured steps, and the metrics of all: one comes before, and one is profiled after."""

    measured: int
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    products: float = 0.0

    @property
    def steps(self) -> int:
        """How many a trainer must make."""
        return self.measured + 2

    def start(self) -> None:
        """The first step starts."""
        self._laps = 0
        self._profile: Any = None
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        """A step ends, and the next starts."""
        import torch

        wall, cpu = time.perf_counter(), time.process_time()
        self._laps += 1
        if self._laps == self.steps:
            self._profile.stop()
            times = {event.key: event.self_cpu_time_total for event in self._profile.key_averages()}
            self.products = sum(times.get(name, 0) for name in PRODUCTS) / sum(times.values())
        elif self._laps > 1:
            self.seconds.append(wall - self._wall)
            self.cpu_seconds.append(cpu - self._cpu)
        if self._laps == self.steps - 1:
            self.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def add(self, other: Clock) -> None:
        """Take the measurements of another round in."""
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.products = max(self.products, other.products)


def make_rows(tokenizer: Any, *, longest: int = MAX_TOKENS, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of random words of up to ``longest`` tokens, whose lengths are spread evenly over the allowed range."""
    draw = random.Random(seed)
    words = "time people water light house story river garden letter music winter summer morning paper stone bridge".split()

    def text(tokens: int) -> str:
        ids = tokenizer(" ".join(draw.choices(words, k=2 * tokens)))["input_ids"]
        return tokenizer.decode(ids[:tokens]).strip()

    def length(bounds: tuple[int, int], index: int) -> int:
        return (bounds[0] + (bounds[1] - bounds[0]) * index // (NUM_ROWS - 1)) * longest // MAX_TOKENS

    rows = [
        {
            "prompt": text(length(PROMPT_TOKENS, index)),
            # two tokens are kept free: the space may be one, and the end of the text is one
            "completion": " " + text(length(RESPONSE_TOKENS, index) - 2),
            "label": index % 2 == 0,
        }
        for index in range(NUM_ROWS)
    ]
    draw.shuffle(rows)
    return rows


def run_trl(
    model: Path,
    rows: list[dict[str, Any]],
    clock: Clock,
    *,
    folder: str,
    gradient_checkpointing: bool = False,
    lora: bool = False,
    nf4: bool = False,
) -> None:
    """Train with TRL's KTOTrainer; settings that are not given are its defaults."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
    from trl.experimental.kto import KTOConfig, KTOTrainer

    clock.version = trl.__version__

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.lap()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "kl" in logs:
                clock.losses.append(logs["loss"])
                clock.kls.append(logs["kl"])

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32", bnb_4bit_use_double_quant=False
    )
    loading = {"dtype": "float32", "quantization_config": quantization if nf4 else None}
    trainer = KTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, **loading),
        ref_model=None if lora else AutoModelForCausalLM.from_pretrained(model, **loading),
        peft_config=LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear") if lora else None,
        args=KTOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=NUM_ROWS,
            max_steps=clock.steps,
            max_length=MAX_TOKENS,
            gradient_checkpointing=gradient_checkpointing,
            beta=BETA,
            learning_rate=OPTIMIZER["learning_rate"],
            adam_beta1=OPTIMIZER["betas"][0],
            adam_beta2=OPTIMIZER["betas"][1],
            adam_epsilon=OPTIMIZER["eps"],
            weight_decay=OPTIMIZER["weight_decay"],
            max_grad_norm=OPTIMIZER["max_grad_norm"],
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list(rows * clock.steps),
        callbacks=[Watch()],
    )
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    trainer.train()


def run_ours(model: Path, rows: list[dict[str, Any]], clock: Clock, *, overrides: list[str], folder: str) -> None:
    """Train with nemo_kto's KTOTrainer on one rank, with its settings for a machine without GPUs (hardware=cpu)."""
    from nemo_kto.algorithms.callbacks import Callback, Event
    from nemo_kto.config import compose
    from nemo_kto.config.resolved import ResolvedRun
    from nemo_kto.data.batches.dataset import KTOExample
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.reference import CachedReference
    from nemo_kto.run.build_trainer import build_trainer
    from nemo_kto.run.policy import build_policy
    from nemo_kto.run.prepare import Placement, prepare

    # TRL takes the KL response from the previous row, nemo_kto from the next row
    rows_file = Path(folder) / "rows.jsonl"
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    cfg, problems = compose.to_config(
        compose.load([*our_overrides(model, rows_file, steps=clock.steps, folder=folder), *overrides])
    )
    assert cfg is not None, problems
    state.init_distributed(layout=state.Layout(), seed=cfg.model.seed)
    run = ResolvedRun.of(cfg)
    trainer: Any = build_trainer(run, build_policy(run), prepare(run), Placement.of(run))
    dataset: list[KTOExample] = [trainer.train_dataloader.dataset[index] for index in range(NUM_ROWS)]
    # the loader shuffles, and other neighbours are other KL examples
    in_order = trainer.train_dataloader.collate_fn(dataset)
    if isinstance(trainer.model.reference, CachedReference):  # these neighbours were not in its pass over the data
        trainer.model.reference.precompute([trainer.model.sequences(in_order)], trainer.model.engine)

    class Laps(Callback):
        def on_fit_start(self, trainer: Any) -> None:
            clock.start()

        def on_train_step_end(self, trainer: Any, event: Event) -> None:
            clock.lap()
            clock.losses.append(event.metrics["loss"])
            clock.kls.append(event.metrics["kl"])

    trainer.train_dataloader = Repeated(in_order, clock.steps)
    trainer.callbacks = [Laps()]
    trainer.fit()


class Repeated:
    """A loader that yields one batch ``count`` times; it is its own order."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count, self.batch_sampler = batch, count, self

    def set_position(self, epoch: int, consumed_in_epoch: int) -> None:
        """There is one epoch."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.count)


def our_overrides(model: Path, rows: Path, *, steps: int, folder: str) -> list[str]:
    """The overrides that give TRL's settings."""
    lr = OPTIMIZER["learning_rate"]
    return [
        "hardware=cpu",
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix={rows}",
        "model.data.splits_string=null",
        f"model.data.seq_length={MAX_TOKENS}",
        f"model.data.cache_dir={folder}/cache",
        f"exp_manager.explicit_log_dir={folder}/run",
        "exp_manager.create_tensorboard_logger=false",
        "export.report=false",
        "trainer.precision=32",
        f"trainer.kto.max_epochs={steps}",
        f"trainer.kto.gradient_clip_val={OPTIMIZER['max_grad_norm']}",
        f"model.global_batch_size={NUM_ROWS}",
        f"model.kto.ref_policy_kl_penalty={BETA}",
        f"model.optim.lr={lr}",
        f"model.optim.betas=[{OPTIMIZER['betas'][0]},{OPTIMIZER['betas'][1]}]",
        f"model.optim.eps={OPTIMIZER['eps']}",
        f"model.optim.weight_decay={OPTIMIZER['weight_decay']}",
        "model.optim.sched.name=constant",
        "model.optim.sched.warmup_steps=0",
        f"model.optim.sched.min_lr={lr}",
    ]


def rows_to_use(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The first rows of the file, or rows of random words."""
    if arguments.rows is not None:
        lines = arguments.rows.read_text().splitlines()
        if len(lines) < NUM_ROWS:
            raise SystemExit(f"{arguments.rows} must hold at least {NUM_ROWS} rows, got {len(lines)}")
        return [json.loads(line) for line in lines[:NUM_ROWS]]
    from transformers import AutoTokenizer

    return make_rows(AutoTokenizer.from_pretrained(arguments.model), longest=arguments.tokens)


def work(arguments: argparse.Namespace) -> None:
    """Run one trainer; executed in a separate process."""
    import torch

    torch.set_num_threads(arguments.threads)
    rows, clock = rows_to_use(arguments), Clock(measured=arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.work in OURS:
            run_ours(arguments.model, rows, clock, overrides=OURS[arguments.work], folder=folder)
        else:
            run_trl(arguments.model, rows, clock, folder=folder, **TRL[arguments.work.removeprefix(OTHER)])
    arguments.result.write_text(json.dumps(asdict(clock)))


def table(results: dict[str, Clock]) -> str:
    """The results as a Markdown table; speed-ups and memory ratios are relative to the first run."""
    first = next(iter(results.values()))
    lines = [
        "| trainer | s / step | CPU s / step | times TRL's speed | matrix products | peak memory | of TRL's | loss | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, clock in results.items():
        label = name.removeprefix(OTHER).replace("TRL", f"TRL {clock.version}")
        cpu, base = statistics.median(clock.cpu_seconds), statistics.median(first.cpu_seconds)
        lines.append(
            f"| {label} | {statistics.median(clock.seconds):.2f} | {cpu:.2f} | {base / cpu:.2f} | {clock.products:.0%} "
            f"| {clock.peak_bytes / 1e9:.2f} GB | {clock.peak_bytes / first.peak_bytes:.2f} "
            f"| {clock.losses[-1]:.8f} | {clock.kls[-1]:.6f} |"
        )
    return "\n".join(lines)


def cost_of_the_reference(results: dict[str, Clock]) -> str:
    """A step with cached reference log-probs over a step that swaps the reference in; empty unless both were run."""
    swapped, cached = (results.get(f"nemo_kto, reference {mode}") for mode in ("swapped", "cached"))
    if swapped is None or cached is None:
        return ""
    wall = statistics.median(cached.seconds) / statistics.median(swapped.seconds)
    cpu = statistics.median(cached.cpu_seconds) / statistics.median(swapped.cpu_seconds)
    return f"\nA step with cached reference log-probs takes {wall:.2f} of a step that swaps ({cpu:.2f} in CPU seconds)."


def run_in_turn(arguments: argparse.Namespace, names: list[str]) -> dict[str, Clock]:
    """Each trainer in a process of its own, round after round."""
    results: dict[str, Clock] = {}
    quiet = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    quiet.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that waits for the other sleeps, and counts no CPU seconds
    with tempfile.TemporaryDirectory() as folder:
        rows_file, result = Path(folder) / "rows.jsonl", Path(folder) / "result.json"
        rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows_to_use(arguments)))
        options = {"rows": rows_file, "steps": arguments.steps, "threads": arguments.threads, "result": result}
        flags = [text for option, value in options.items() for text in (f"--{option}", str(value))]
        for name in names * arguments.rounds:
            python = arguments.other_trl if name.startswith(OTHER) else sys.executable
            command = [python, "-W", "ignore", __file__, str(arguments.model), *flags, "--work", name]
            subprocess.run(command, check=True, env=quiet, stdout=sys.stderr)
            clock = Clock(**json.loads(result.read_text()))
            print(f"{name}: {statistics.median(clock.cpu_seconds):.2f} CPU seconds", file=sys.stderr)
            if name in results:
                results[name].add(clock)
            else:
                results[name] = clock
    return results


def main() -> None:
    """Run each trainer in a separate process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help="of the longest row without --rows, at most 384")
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured, after one that is not")
    parser.add_argument("--rounds", type=int, default=1, help="how often each trainer has its turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=RUNS, action="append", help="run this one; may be given more than once")
    parser.add_argument("--other-trl", metavar="PYTHON", help="of an environment with another version of TRL")
    parser.add_argument("--work", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    names = arguments.only or [name for name in RUNS if "LoRA" not in name or name in OURS]
    names = [name for name in names if arguments.only or arguments.other_trl or not name.startswith(OTHER)]
    if not arguments.other_trl and any(name.startswith(OTHER) for name in names):
        parser.error("other TRL needs --other-trl PYTHON")
    results = run_in_turn(arguments, names)
    told = f"{NUM_ROWS} rows of up to {arguments.tokens} tokens, fp32, {arguments.threads} threads"
    print(f"{told}, medians of {arguments.steps * arguments.rounds} steps\n")
    print(table(results))
    print(cost_of_the_reference(results))
    return None


if __name__ == "__main__":
    main()
