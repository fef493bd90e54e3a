"""The whole job on a small real model: align it, export it, and see on held-out rows that it learned.

    make quickstart         KTO on reviews that are good or bad, all weights
    make quickstart-pairs   DPO on pairs of a good and a bad review, LoRA

or, where nemo_kto[quickstart] is installed:  python examples/quickstart/run.py kto|dpo [OVERRIDES]

What follows the algorithm goes to `nemo-kto` as it is, after the recipe below, e.g. trainer.kto.max_steps=40.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import prepare
import score

from nemo_kto.parallel import cpu

HELD_OUT, SEED, BETA = 256, 1234, 0.1
# Reviews to learn from, and what is particular to each recipe.
TRAIN = {"kto": 960, "dpo": 960}
OWN = {
    "kto": [
        "model.global_batch_size=32",
        "model.micro_batch_size=16",
        "model.optim.lr=4e-5",
        "model.optim.sched.min_lr=1e-5",
        "trainer.kto.max_steps=20",
        "trainer.kto.limit_val_batches=1",
    ],
    "dpo": [
        "model.global_batch_size=16",
        "model.micro_batch_size=8",
        "model.peft.peft_scheme=lora",
        "model.peft.lora_tuning.target_modules=[all]",
        "model.peft.lora_tuning.adapter_dim=16",
        "model.optim.lr=1e-3",
        "model.optim.sched.min_lr=2e-4",
        "trainer.dpo.max_steps=24",
        "trainer.dpo.limit_val_batches=2",
    ],
}


def recipe(algorithm: str, model: Path, train: Path, validation: Path, folder: Path) -> list[str]:
    """The overrides of this run: two ranks that share every layer (fewer where there is but one GPU)."""
    ranks = min(2, cpu.device_count() or 2)
    return [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix={{train:['{train}'],validation:['{validation}']}}",
        f"exp_manager.explicit_log_dir={folder}",
        f"trainer.devices={ranks}",
        "trainer.precision=bf16",
        f"model.tensor_model_parallel_size={ranks}",
        *OWN[algorithm],
        f"model.{algorithm}.ref_policy_kl_penalty={BETA}",
        "model.optim.weight_decay=0",
        "model.optim.sched.name=LinearAnnealing",
        "model.optim.sched.warmup_steps=2",
        f"trainer.{algorithm}.val_before_training=true",
        f"trainer.{algorithm}.val_check_interval=0",
        f"trainer.{algorithm}.save_interval=0",
        "exp_manager.checkpoint_callback_params.save_top_k=0",
    ]


def train(algorithm: str, overrides: list[str]) -> None:
    """Run the public command, as a user would type it."""
    installed = Path(sys.executable).with_name("nemo-kto")
    program = [str(installed)] if installed.exists() else [sys.executable, "-m", "nemo_kto.launch.cli"]
    print(f"$ nemo-kto {algorithm} \\\n    " + " \\\n    ".join(overrides), flush=True)
    subprocess.run([*program, algorithm, *overrides], check=True, stdin=subprocess.DEVNULL)


def measure(reference: Path, aligned: Path, validation: Path) -> dict[str, float]:
    """Implied rewards, beta * (log-prob of the model - log-prob of the reference), of the held-out rows before and after."""
    conversations, labels = score.read_rows(validation)
    start = score.answer_logps(reference, conversations)
    end = score.answer_logps(aligned, conversations)
    before, after = BETA * (start - start), BETA * (end - start)
    return {
        "rows": len(labels),
        "margin_before": score.margin(before, labels),
        "margin_after": score.margin(after, labels),
        "auc_before": score.auc(before, labels),
        "auc_after": score.auc(after, labels),
        "accuracy_before": score.accuracy(before),
        "accuracy_after": score.accuracy(after),
    }


def show(algorithm: str, figures: dict[str, float], reference: Path, aligned: Path, folder: Path) -> None:
    prompts = [prepare.PROMPTS[number] for number in (0, 20)]
    print("\nSample texts (the same seed for both models)")
    old, new = score.sample(reference, prompts, seed=SEED), score.sample(aligned, prompts, seed=SEED)
    for prompt, before, after in zip(prompts, old, new, strict=True):
        print(f"  {prompt}\n    before: {before!r}\n    after:  {after!r}")
    print(f"\nHeld-out reviews: {figures['rows']:.0f}, half of them good           before    after")
    ranking = ("AUC: a good review is rewarded above a bad one     ", "auc")
    if algorithm == "dpo":
        ranking = ("accuracy: the good review of a pair is rewarded more", "accuracy")
    for title, name in (("reward margin, good minus bad reviews              ", "margin"), ranking):
        print(f"  {title} {figures[f'{name}_before']:7.3f}  {figures[f'{name}_after']:7.3f}")
    print(f"\n  aligned model, for transformers   {aligned}")
    print(f"  the model it started from         {reference}")
    print(f"  metrics, config, TensorBoard      {folder}")


def main() -> None:
    algorithm, *overrides = sys.argv[1:] or ["kto"]
    if algorithm not in OWN:
        raise SystemExit(f"the first argument must be {' or '.join(OWN)}, got {algorithm}")
    cache = prepare.default_cache()
    print(f"Model and reviews: {cache}", flush=True)
    reference = prepare.prepare_model(cache)
    sizes = {"train": TRAIN[algorithm], "validation": HELD_OUT}
    rows = prepare.prepare_rows(cache, reference, **sizes, seed=SEED, pairs=algorithm == "dpo")
    folder = Path(f"runs/quickstart-{algorithm}").resolve()
    shutil.rmtree(folder, ignore_errors=True)  # each time from the start, so that before is before

    started = time.monotonic()
    train(algorithm, [*recipe(algorithm, reference, *rows, folder), *overrides])
    trained = time.monotonic()
    figures = measure(reference, folder / "hf", rows[1])
    figures["training_seconds"] = round(trained - started, 1)
    (folder / "quickstart.json").write_text(json.dumps(figures, indent=2) + "\n")
    show(algorithm, figures, reference, folder / "hf", folder)
    print(f"\nTraining and export took {trained - started:.0f} s, measuring {time.monotonic() - trained:.0f} s.")


if __name__ == "__main__":
    main()
