"""One run of benchmarks/gpu.py with nemo_kto, on one rank, without checkpoints and export.

python benchmarks/gpu_ours.py SETTINGS.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.callbacks import Callback, Event, PrecomputeReference
from nemo_kto.config import compose
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.planner.plan_run import size_micro_batches, these_machines
from nemo_kto.run import build
from nemo_kto.telemetry.throughput import device_peak_flops

LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.target_modules=[all]",
    "model.peft.lora_tuning.adapter_dim=16",
]


class Watch(Callback):
    """Notes each step, with the seconds of its phases."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {"seconds": [], "tokens": [], "flops": [], "losses": [], "kls": [], "phases": []}

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        times = {name.removeprefix("timing/"): seconds for name, seconds in event.report.items() if "timing/" in name}
        self.found["seconds"].append(times.pop("step_time"))
        self.found["phases"].append(times)
        self.found["tokens"].append(int(event.metrics.sums["tokens"]))
        self.found["flops"].append(float(event.metrics.sums["flops"]))
        self.found["losses"].append(event.metrics["loss"])
        self.found["kls"].append(event.metrics["kl"])


def overrides(settings: dict[str, Any]) -> list[str]:
    """The command line; what is not given is the default of conf/."""
    steps, lr = settings["steps"], settings["lr"]
    return [
        f"pretrained_checkpoint.restore_from_path={settings['model']}",
        f"model.data.data_prefix={settings['rows']}",
        "model.data.splits_string=null",
        f"model.data.seq_length={settings['longest']}",
        f"model.data.cache_dir={settings['folder']}/cache",
        f"exp_manager.explicit_log_dir={settings['folder']}/run",
        "exp_manager.create_tensorboard_logger=false",
        "export.report=false",
        f"trainer.precision={'bf16' if settings['dtype'] == 'bfloat16' else '32'}",
        f"trainer.kto.max_epochs={steps}",
        f"model.global_batch_size={settings['rows_of_a_step']}",
        f"model.kto.ref_policy_kl_penalty={settings['beta']}",
        f"model.reference.mode={settings['reference']}",
        f"model.optim.lr={lr}",
        f"model.optim.sched.min_lr={lr}",
        "model.optim.sched.name=constant",
        "model.optim.sched.warmup_steps=0",
        *(LORA if settings["lora"] else []),
        *settings["overrides"],
    ]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, and say how it went."""
    cfg, problems = compose.to_config(compose.load(overrides(settings)))
    assert cfg is not None, problems
    state.init_distributed(layout=state.Layout(), seed=cfg.model.seed)
    resolved = ResolvedRun.of(cfg)
    machines = these_machines(resolved, ranks=1, local=1, timed=False)
    resolved = resolved.with_micro_batch_tokens(*size_micro_batches(resolved, machines))
    policy = build.build_policy(resolved)
    trainer = build.build_trainer(resolved, policy, build.prepare(resolved))
    watch = Watch()
    trainer.callbacks = [*(each for each in trainer.callbacks if isinstance(each, PrecomputeReference)), watch]
    trainer.fit()
    here = device.current_device()
    return {
        **watch.found,
        "peak_bytes": device.peak_memory_bytes(),
        "peak_flops": device_peak_flops(here, resolved.dtype, name=device.device_name()),
        "device": device.device_name(),
        "engine": any(type(part).__name__.startswith("TE") for part in policy.chunks[0].modules()),
    }


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(settings)))
    state.destroy()


if __name__ == "__main__":
    main()
