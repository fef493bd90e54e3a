"""A step of `make gpu` with TRL's KTOTrainer (1.5 to 1.16): KTO of one model in one process, in several settings.

    python benchmarks/gpu_trl.py LINES KEY --folder FOLDER [--toy]

FOLDER has the model and the rows. The program imports nothing of nemo_kto: the interpreter needs torch and TRL alone.
The first step of a setting is not counted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.gpu_lines import Lines

try:
    from trl.trainer.kto_trainer import KTOConfig, KTOTrainer
except ImportError:
    from trl.experimental.kto import KTOConfig, KTOTrainer

STEP = "trl"
ON_GPU = torch.cuda.is_available()
BETA, LR = 0.1, 1e-6
STEPS = 3
# Main weights in fp32 are its mixed precision and what nemo_kto does; weights in bf16 need less, and lose small updates.
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32 weights, 8 rows": {"dtype": "float32", "rows": 8},
    "bf16 weights, 8 rows": {"dtype": "bfloat16", "rows": 8},
    "fp32 weights, 4 rows": {"dtype": "float32", "rows": 4},
    "fp32 weights, 8 rows, reference precomputed": {"dtype": "float32", "rows": 8, "precompute": True},
    "bf16 weights, 8 rows, reference precomputed": {"dtype": "bfloat16", "rows": 8, "precompute": True},
    "fp32 weights, 8 rows, liger": {"dtype": "float32", "rows": 8, "liger": True},
    "fp32 weights, 16 rows, recomputed": {"dtype": "float32", "rows": 16, "recompute": True},
}


def now() -> float:
    """Seconds, when the device has completed its work."""
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
    """Records each step."""

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


def train(
    folder: Path, *, dtype: str, rows: int, toy: bool, precompute: bool = False, liger: bool = False, recompute: bool = False
) -> dict[str, Any]:
    """Train with micro-batches of ``rows``, and return what was measured."""
    data = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    watch = Watch()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = KTOConfig(
            output_dir=scratch,
            model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
            use_cpu=not ON_GPU,
            bf16=ON_GPU and not toy,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=(8 if toy else 64) // rows,
            gradient_checkpointing=recompute,
            use_liger_kernel=liger,
            precompute_ref_log_probs=precompute,
            max_steps=STEPS,
            max_length=4096,
            beta=BETA,
            learning_rate=LR,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = str(folder / "model")
        watch.trainer = trainer = Counted(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[watch],
        )
        trainer.train()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, tokens = (sum(watch.found[name][1:]) for name in ("seconds", "tokens"))
    return {
        "seconds": seconds / (STEPS - 1),
        "all seconds": watch.found["seconds"],
        "tokens": watch.found["tokens"],
        "tokens per second": tokens / seconds,
        "losses": watch.found["losses"],
        "peak GB": (torch.cuda.max_memory_allocated() if ON_GPU else rss) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("key")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    lines = Lines(file=arguments.lines, key=arguments.key)
    for name, settings in SETTINGS.items():
        if arguments.toy and settings != SETTINGS["fp32 weights, 4 rows"]:
            continue
        lines.measure(STEP, name, functools.partial(train, arguments.folder, toy=arguments.toy, **settings))


if __name__ == "__main__":
    main()
