"""Compare the numbers of two trees: every figure of 20 short jobs, equal to the last bit, and their checkpoints.

    python -m tests.same_numbers run FOLDER [--tree TREE]       run the jobs with the package of TREE (default: this one)
    python -m tests.same_numbers resume FOLDER BEFORE           resume the checkpoints of BEFORE with this package
    python -m tests.same_numbers compare FOLDER BEFORE          compare what both logged

To be run before and after a change that is meant to change no number.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.tiny_models import make_checkpoint, make_pairs, make_rows, write_rows

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS, SAVED = 4, 2
TP2, PP2, CP2 = (f"model.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
VP2, SP = "model.virtual_pipeline_model_parallel_size=2", "model.sequence_parallel=true"
EP2, BALANCE = "model.expert_model_parallel_size=2", "model.moe_aux_loss_coeff=0.02"
PACKED = ["model.data.packing=true", "model.micro_batch_size=null", "model.micro_batch_tokens=180"]
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4", "model.optim.lr=5e-3"]
DORA, ORPO = [*LORA, "model.peft.lora_tuning.dora=true"], ["model.dpo.preference_loss=orpo"]
# Name: algorithm, family, ranks, overrides. Prompts are shared, except with context parallelism.
JOBS: dict[str, tuple[str, str, int, list[str]]] = {
    "kto": ("kto", "llama", 1, ["model.data.share_prompts=false"]),
    "kto-shared": ("kto", "llama", 1, []),
    "kto-tp2-pp2": ("kto", "llama", 4, [TP2, PP2]),
    "kto-pp2-vp2": ("kto", "llama", 2, [PP2, VP2]),
    "kto-packed-cp2": ("kto", "llama", 2, [CP2, *PACKED]),
    "kto-packed-dp2": ("kto", "llama", 2, PACKED),
    "kto-lora-tp2": ("kto", "llama", 2, [TP2, *LORA]),
    "kto-dora": ("kto", "llama", 1, DORA),
    "kto-experts-ep2": ("kto", "mixtral", 2, [EP2, BALANCE]),
    "kto-bf16": ("kto", "llama", 1, ["trainer.precision=bf16"]),
    "bco-dp2": ("kto", "llama", 2, ["model.kto.preference_loss=bco"]),
    "bco-pp2": ("kto", "llama", 2, ["model.kto.preference_loss=bco", PP2]),
    "dpo": ("dpo", "llama", 1, ["model.data.share_prompts=false"]),
    "dpo-cp2": ("dpo", "llama", 2, [CP2]),
    "dpo-packed-tp2-sp": ("dpo", "llama", 2, [TP2, SP, *PACKED]),
    "dpo-lora-pp2": ("dpo", "llama", 2, [PP2, *LORA]),
    "dpo-experts-tp2-ep2": ("dpo", "qwen3_moe", 2, [TP2, SP, EP2, "model.expert_tensor_parallel_size=1", BALANCE]),
    "dpo-bf16-tp2": ("dpo", "llama", 2, [TP2, "trainer.precision=bf16"]),
    "orpo": ("dpo", "llama", 1, [*ORPO, "model.reference.mode=auto"]),
    "orpo-packed-dp2": ("dpo", "llama", 2, [*ORPO, "model.reference.mode=auto", *PACKED]),
}


def command(name: str, inputs: Path, folder: Path) -> list[str]:
    """Return the command line of a job that writes into a folder."""
    algorithm, family, ranks, overrides = JOBS[name]
    rows, held_out = inputs / f"{algorithm}.jsonl", inputs / f"{algorithm}-held-out.jsonl"
    defaults = [
        f"model.data.data_prefix={{train: {rows}, validation: {held_out}}}",
        f"model.data.cache_dir={inputs / 'cache'}",
        f"exp_manager.explicit_log_dir={folder}",
        f"trainer.devices={ranks}",
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        f"trainer.{algorithm}.max_steps={STEPS}",
        f"trainer.{algorithm}.save_interval={SAVED}",
        f"trainer.{algorithm}.val_check_interval={SAVED}",
        "exp_manager.checkpoint_callback_params.save_top_k=-1",
        "model.global_batch_size=16",
        "model.micro_batch_size=4",
        "model.data.seq_length=64",
        "model.optim.lr=5e-4",
        "model.optim.sched.warmup_steps=2",
        "export.report=false",
        "export.enabled=false",
    ]
    chosen = {override.partition("=")[0]: override for override in [*defaults, *overrides]}
    return [sys.executable, "-m", "nemo_kto.cli.main", algorithm, str(inputs / family), *chosen.values()]


def run(name: str, inputs: Path, folder: Path, tree: Path) -> None:
    """Run a job with the package of a tree; its output is shown if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command(name, inputs, folder), cwd=tree, env=environment, text=True, capture_output=True)
    print(name, "failed" if result.returncode else "done", flush=True)
    if result.returncode:
        print(result.stdout[-4000:], result.stderr[-4000:])


def write_inputs(folder: Path) -> None:
    """Write models and rows, the same in every folder."""
    for family in ("llama", "mixtral", "qwen3_moe"):
        make_checkpoint(folder / family, family)
    write_rows(folder / "kto.jsonl", make_rows(96))
    write_rows(folder / "kto-held-out.jsonl", make_rows(23, seed=2))
    write_rows(folder / "dpo.jsonl", make_pairs(96))
    write_rows(folder / "dpo-held-out.jsonl", make_pairs(23, seed=3))


def logged(folder: Path) -> dict[tuple[int, str], float]:
    """Return every train/ and val/ figure of a run by its step and name, of a repeated step the last; none if it failed."""
    found, file = dict[tuple[int, str], float](), folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        found |= {(row["step"], name): value for name, value in row.items() if name.startswith(("train/", "val/"))}
    return found


def compare(folder: Path, before: Path) -> int:
    """Print for each job of a folder how many figures differ from those before; return how many jobs differ."""
    different = 0
    for name in JOBS:
        ours, theirs = logged(folder / name), logged(before / name)
        wrong = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
        different += bool(wrong or not theirs)
        print(f"{name:22} {len(theirs):4} figures, {len(wrong)} differ", *sorted(wrong)[:3])
    print(f"{len(JOBS) - different} of {len(JOBS)} jobs are equal")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "resume", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--tree", type=Path, default=REPOSITORY)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.action == "compare":
        sys.exit(compare(folder, given.before))
    inputs = folder / "inputs"
    if given.action == "resume":
        shutil.copytree(given.before / "inputs", inputs)
    else:
        write_inputs(inputs)
    for name in JOBS:
        if given.action == "resume":
            checkpoint = Path("checkpoints", f"step_{SAVED:06}")
            shutil.copytree(given.before / name / checkpoint, folder / name / checkpoint)
            shutil.copy(given.before / name / "metrics.jsonl", folder / name)
        run(name, inputs, folder / name, given.tree.resolve())


if __name__ == "__main__":
    main()
