"""Complete runs on a device: a command line in a separate process, and its logged metrics.

The jobs get the device by name, so that the same tests compare a GPU with the CPU and, without a GPU, the CPU
with itself at other settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_kto.device import device
from tests.helpers.commands import CLI, TRAINING, environment, run, run_interpreter
from tests.helpers.training_jobs import trajectory

GPUS = device.device_count()
IS_EMULATED = "tests.emulated_cuda.start" in sys.modules
STEPS = 4
LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4", "model.peft.lora_tuning.target_modules=[all]")
# Models other than Llama: the family, by the name of its folder, which is in that of the runs.
FAMILIES = {"experts": "qwen3_moe", "delta-nets": "qwen3_5_text", "latents": "deepseek_v3", "mamba": "nemotron_h"}
OF_FAMILY = {name: (f"pretrained_checkpoint.restore_from_path={name}",) for name in FAMILIES}
EXPERTS = OF_FAMILY["experts"]


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Files shared by the jobs of a module.

    Attributes:
        model: a Hugging Face folder.
        rows, pairs: jsonl files for KTO and DPO.
        folder: of their runs, one for each call.
    """

    model: Path
    rows: Path
    pairs: Path
    folder: Path

    def command(self, name: str, *overrides: str, algorithm: str = "kto", callbacks: Sequence[str] = ()) -> list[str]:
        """The command line of the job whose run folder is ``folder``/``name``."""
        data = {"kto": self.rows, "dpo": self.pairs}[algorithm]
        recorded = f"{{_target_: tests.gpu.recorders.RecordModel, file: {self.folder / name}.json}}"
        return [
            *CLI,
            algorithm,
            f"pretrained_checkpoint.restore_from_path={self.model}",
            f"model.data.data_prefix={{train: {data}, validation: {data}}}",
            f"model.data.cache_dir={self.folder / name}-cache",
            f"exp_manager.explicit_log_dir={self.folder / name}",
            "exp_manager.create_tensorboard_logger=false",
            "export.report=false",
            "trainer.precision=32",
            f"trainer.{algorithm}.max_steps={STEPS}",
            f"trainer.{algorithm}.val_check_interval={STEPS}",
            f"trainer.{algorithm}.limit_val_batches=1",
            f"trainer.{algorithm}.save_interval=0",
            "exp_manager.checkpoint_callback_params.save_top_k=0",
            "model.global_batch_size=8",
            "model.micro_batch_size=4",
            "model.data.seq_length=64",
            "model.reference.mode=swap",
            "model.optim.lr=1e-4",
            "model.optim.sched.name=constant",
            "model.optim.sched.warmup_steps=2",
            f"trainer.callbacks=[{', '.join([recorded, *callbacks])}]",
            *overrides,
        ]

    def run(
        self,
        name: str,
        *overrides: str,
        algorithm: str = "kto",
        callbacks: Sequence[str] = (),
        status: int = 0,
        env: dict[str, str] | None = None,
    ) -> Path:
        """The folder of the finished run."""
        self.finish(self.command(name, *overrides, algorithm=algorithm, callbacks=callbacks), status=status, env=env)
        return self.folder / name

    def finish(self, words: list[str], *, status: int = 0, env: dict[str, str] | None = None) -> str:
        """Run a Python command; returns its standard output."""
        where = environment() | {"OMP_NUM_THREADS": "1"} | (env or {})
        if GPUS and not IS_EMULATED:  # CUDA does not survive a fork
            done = run_interpreter(words, cwd=self.folder, env=where, timeout=300)
        else:
            done = run(words, cwd=self.folder, env=where, preload=TRAINING, timeout=300)
        assert done.returncode == status, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def recorded(self, name: str) -> dict[str, list[str]]:
        """What :class:`tests.gpu.recorders.RecordModel` wrote of a run."""
        found: dict[str, list[str]] = json.loads((self.folder / f"{name}.json").read_text())
        return found


def on(device: str, *, ranks: int = 1) -> list[str]:
    """Overrides for a number of devices of a kind."""
    return [f"trainer.accelerator={device}", f"trainer.devices={ranks}"]


def assert_close(run: Path, expected: Path, *, tolerance: float, in_bf16: bool = False) -> None:
    """Both runs logged the same figures, relative to the value or, for values near nothing, to 0.1.

    A log-ratio is a small difference of two log-probs. In bf16 its error is therefore relative to a quarter of those, a pair
    of rewards may change its order, and the norm of the gradient, which log-ratios weight, is known to 5e-2.
    """
    ours, theirs = trajectory(run), trajectory(expected)
    assert len(ours) == len(theirs) == STEPS
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert mine.keys() == other.keys()
        logp = max(abs(value) for name, value in other.items() if "/logps_" in name)
        for name, value in other.items():
            is_ratio = in_bf16 and name.partition("/")[2].startswith(("kl", "rewards"))
            if in_bf16 and name.endswith(("/acc", "/auc")):
                continue
            scale = logp / 4 if is_ratio else max(abs(value), 0.1) * (2.5 if in_bf16 and "grad_norm" in name else 1)
            error = abs(mine[name] - value) / scale
            assert error < tolerance, f"step {step}: {name} is {mine[name]}, expected {value} to {tolerance}"
