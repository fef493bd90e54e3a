"""One run of benchmarks/gpu.py with TRL's KTOTrainer, in whichever version this interpreter has (1.5 or 1.16).

    python benchmarks/gpu_trl.py SETTINGS.json RESULT.json

It imports nothing of nemo_kto, so that the interpreter needs torch and TRL alone.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

try:
    from trl.trainer.kto_trainer import KTOConfig, KTOTrainer
except ImportError:
    from trl.experimental.kto import KTOConfig, KTOTrainer

ON_GPU = torch.cuda.is_available()


def now() -> float:
    """Seconds, when the device has done what was asked of it."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class Counted(KTOTrainer):
    """Counts the tokens of the samples, without their padding."""

    tokens: Any = 0

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        mask = "attention_mask" if "attention_mask" in inputs else "completion_attention_mask"  # as TRL before 1.16 calls it
        self.tokens = self.tokens + inputs[mask].sum()
        return super().training_step(model, inputs, *arguments, **options)


class Watch(TrainerCallback):
    """Notes each step."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {"seconds": [], "tokens": [], "losses": [], "kls": []}
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = now()
        self.found["seconds"].append(ended - self.started)
        self.found["tokens"].append(int(self.trainer.tokens))
        self.started, self.trainer.tokens = ended, 0

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "kl" in logs:
            self.found["losses"].append(float(logs["loss"]))
            self.found["kls"].append(float(logs["kl"]))


def arguments(settings: dict[str, Any], folder: str) -> KTOConfig:
    """Of the trainer; what is not given is its default."""
    return KTOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": settings["dtype"], "attn_implementation": settings["attention"]},
        use_cpu=not ON_GPU,
        bf16=ON_GPU,
        per_device_train_batch_size=settings["batch_size"],
        gradient_accumulation_steps=settings["rows_of_a_step"] // settings["batch_size"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        use_liger_kernel=settings["liger"],
        precompute_ref_log_probs=settings["precompute"],
        max_steps=settings["steps"],
        max_length=settings["longest"],
        beta=settings["beta"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def run(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train, and say how it went."""
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    adapters = None
    if settings["lora"]:
        from peft import LoraConfig

        adapters = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    watch = Watch()
    watch.trainer = trainer = Counted(
        model=settings["model"],
        args=arguments(settings, folder),
        train_dataset=Dataset.from_list(rows * settings["steps"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        peft_config=adapters,
        callbacks=[watch],
    )
    trainer.train()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**watch.found, "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else rss}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(settings, settings["folder"])))


if __name__ == "__main__":
    main()
