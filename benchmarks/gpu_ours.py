"""Steps of `make gpu` with nemo_kto's trainer: KTO of one model in one process, in several settings, some of them profiled.

    python benchmarks/gpu_ours.py llama-1b|qwen-7b LINES KEY --folder FOLDER [--toy]

FOLDER has the model and the rows. Each setting builds the model, the reference and the trainer as `nemo-kto
kto` does, without checkpoints and export. The first two steps of a setting are not counted; where it is profiled, neither is
the last.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import gpu_models
from benchmarks.gpu_lines import Lines
from benchmarks.gpu_models import Size
from nemo_kto.algorithms.callbacks import Callback, Event, PrecomputeReference
from nemo_kto.config import compose
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.memory.hardware import these_machines
from nemo_kto.memory.micro_batches import repeats_keys
from nemo_kto.memory.rank_memory import CONTEXT
from nemo_kto.memory.run_plan import make_plan
from nemo_kto.run.build_trainer import build_trainer
from nemo_kto.run.policy import build_policy
from nemo_kto.run.prepare import fit_to_memory, prepare
from nemo_kto.run.summary import start_lines
from nemo_kto.telemetry.display import table
from nemo_kto.telemetry.watch import device_peak_flops
from nemo_kto.tools.plan.speed import speed_of

UNCOUNTED = 2  # steps of a setting in which kernels are compiled and memory is first allocated
SHOWN = 40  # kernels of a profile

CACHED, SWAP, ADAPTER = (f"model.reference.mode={name}" for name in ("cached", "swap", "adapter"))
LORA = (
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.target_modules=[all-linear]",
    "model.peft.lora_tuning.adapter_dim=16",
)


def tokens(number: int) -> str:
    return f"model.micro_batch_tokens={number}"


def chunk(number: int) -> str:
    return f"model.logprob_chunk_size={number}"


# What is varied, around the defaults: the key words of a name are those of the table. Those that matter most come first.
SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama-1b": {
        "swap": (SWAP,),
        "cached": (CACHED,),
        "swap from the host": (SWAP, "model.reference.device=cpu"),
        "cached, two summands": (CACHED, "model.logprob_gradient_summands=2"),
        "cached, chunks of 1024": (CACHED, chunk(1024)),
        "cached, 8k tokens": (CACHED, tokens(8192)),
        "cached, 32k tokens": (CACHED, tokens(32768)),
        "swap, 32k tokens": (SWAP, tokens(32768)),
    },
    "qwen-7b": {
        "adapters disabled": (ADAPTER, *LORA),
        "cached": (CACHED, *LORA),
        "adapters disabled, 16k tokens": (ADAPTER, tokens(16384), *LORA),
    },
}
PROFILED = ("cached", "swap", "adapters disabled")


class Watch(Callback):
    """Records each step, and a profile of the last one if it is asked for."""

    def __init__(self, *, steps: int, profiled: bool) -> None:
        self.steps: list[dict[str, Any]] = []
        self.profile: dict[str, Any] = {}
        self._last, self._profiled = steps, profiled
        self._profiler: Any = None

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        times = {name.removeprefix("timing/"): seconds for name, seconds in event.report.items() if "timing/" in name}
        sums, metrics = event.metrics.sums, event.metrics
        found: dict[str, Any] = {name: float(sums[name]) for name in ("tokens", "flops")}
        self.steps.append({"seconds": times.pop("step_time"), "phases": times, "loss": metrics["loss"], **found})
        if self._profiled and len(self.steps) == self._last - 1:
            device.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()
        elif self._profiler is not None:
            device.synchronize()
            self._profiler.__exit__(None, None, None)
            self.profile = profile_of(self._profiler)
            self._profiler = None


def profile_of(profiler: Any) -> dict[str, Any]:
    """Return a step's kernel time, the time in which no kernel ran, launches, and the kernels that took the most."""
    kernels: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    host: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name[:70]] += event.time_range.elapsed_us()
            calls[event.name[:70]] += 1
            spans.append((event.time_range.start, event.time_range.end))
        elif event.name.startswith("cuda"):
            host[event.name] += 1
    busy, last = 0.0, 0.0
    gaps: list[float] = []
    for begin, end in sorted(spans):
        if last and begin > last:
            gaps.append(begin - last)
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    shown = {name: {"ms": time / 1000, "calls": calls[name]} for name, time in kernels.most_common(SHOWN)}
    return {
        "busy ms": busy / 1000,
        "idle ms": sum(gaps) / 1000,
        "longest gaps ms": [gap / 1000 for gap in sorted(gaps, reverse=True)[:5]],
        "kernels": sum(calls.values()),
        "host": dict(host.most_common(8)),
        "largest": shown,
    }


def overrides(size: Size, folder: Path, *settings: str, steps: int) -> list[str]:
    """The command line; what is not given is the default of conf/."""
    return [
        f"pretrained_checkpoint.restore_from_path={folder / 'model'}",
        f"model.data.data_prefix={folder / 'rows.jsonl'}",
        "model.data.splits_string=null",
        f"model.data.seq_length={size.longest}",
        f"model.data.cache_dir={folder / 'cache'}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "exp_manager.create_tensorboard_logger=false",
        "export.report=false",
        f"trainer.precision={'bf16' if size.dtype == 'bfloat16' else '32'}",
        f"trainer.kto.max_steps={steps}",
        f"model.global_batch_size={size.rows}",
        f"model.kto.ref_policy_kl_penalty={gpu_models.BETA}",
        f"model.optim.lr={gpu_models.LR}",
        f"model.optim.sched.min_lr={gpu_models.LR}",
        "model.optim.sched.name=constant",
        "model.optim.sched.warmup_steps=0",
        *settings,
    ]


def train(words: list[str], *, steps: int, profiled: bool) -> dict[str, Any]:
    """Train as `nemo-kto kto` does, and return what was measured beside the plan."""
    began = time.perf_counter()
    cfg, problems = compose.to_config(compose.load(words))
    assert cfg is not None, problems
    state.init_distributed(layout=state.Layout(), seed=cfg.model.seed)
    try:
        run = ResolvedRun.of(cfg)
        machines = replace(these_machines(run, ranks=1, local=1, timed=False), repeats_keys=repeats_keys(run))
        start = prepare(run)
        placement = fit_to_memory(run, start.data, machines)
        counts = start.data.splits.in_use["train"].counts
        planned = run.with_row_tokens(counts.tokens / counts.rows)
        planned = planned.with_micro_batch_tokens(placement.micro_batch_tokens, placement.micro_batch_reason)
        planned = planned.with_reference_memory(placement.reference_memory, placement.reference_reason)
        plan = make_plan(planned, machines)
        gc.collect()
        if device.on_gpu():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        policy = build_policy(run)
        device.synchronize()
        loaded = time.perf_counter()
        print(table("nemo-kto kto", start_lines(run, policy, start, placement)), file=sys.stderr)
        trainer = build_trainer(run, policy, start, placement)
        watch = Watch(steps=steps, profiled=profiled)
        trainer.callbacks = [*(each for each in trainer.callbacks if isinstance(each, PrecomputeReference)), watch]
        built = time.perf_counter()
        trainer.fit()
        here = device.current_device()
        peak_flops = device_peak_flops(here, run.dtype, name=device.device_name())
        return {
            **summary(watch, profiled=profiled, peak_flops=peak_flops),
            "peak GB": device.peak_memory_bytes() / 1e9,
            "planned GB": (plan.largest.device - CONTEXT) / 1e9,
            "planned seconds": speed_of(plan).seconds,
            "micro-batch tokens": placement.micro_batch_tokens or run.cfg.model.micro_batch_tokens,
            "reference on": placement.reference_memory,
            "layers of Transformer Engine": any(type(part).__name__.startswith("TE") for part in policy.chunks[0].modules()),
            "seconds to load": loaded - began,
            "seconds to build": built - loaded,
        }
    finally:
        state.destroy()


def summary(watch: Watch, *, profiled: bool, peak_flops: float | None) -> dict[str, Any]:
    """Return means over the counted steps, whose numbers of tokens differ."""
    counted = watch.steps[UNCOUNTED : len(watch.steps) - profiled] or watch.steps
    seconds, tokens, flops = (sum(step[name] for step in counted) for name in ("seconds", "tokens", "flops"))
    found = {
        "seconds": seconds / len(counted),
        "all seconds": [step["seconds"] for step in watch.steps],
        "phases": {
            name: statistics.fmean(step["phases"].get(name, 0.0) for step in counted) for name in counted[0]["phases"]
        },
        "tokens": [step["tokens"] for step in watch.steps],
        "tokens per second": tokens / seconds,
        "MFU": flops / seconds / peak_flops if peak_flops else None,
        "losses": [step["loss"] for step in watch.steps],
    }
    return found | ({"profile": watch.profile} if watch.profile else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=SETTINGS)
    parser.add_argument("lines", type=Path)
    parser.add_argument("key")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    lines = Lines(file=arguments.lines, key=arguments.key)
    size, folder = (gpu_models.TOYS if arguments.toy else gpu_models.SIZES)[arguments.step], arguments.folder
    steps = 3 if arguments.toy else gpu_models.STEPS
    for name, settings in SETTINGS[arguments.step].items():
        profiled = name in PROFILED and device.on_gpu() and not arguments.toy
        words = overrides(size, folder, *settings, steps=steps)
        lines.measure(arguments.step, name, functools.partial(train, words, steps=steps, profiled=profiled))
        gc.collect()


if __name__ == "__main__":
    main()
