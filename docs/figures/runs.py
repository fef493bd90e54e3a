"""The runs behind the gallery and the curves: one table of configurations, and the command that runs them.

    python -m docs.figures.runs FOLDER [NAME ...]

FOLDER receives the model and the rows of the quickstart (examples/quickstart/prepare.py) and the run folders. The metrics
that the figures need are written to docs/figures/data/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
DATA = HERE / "data"
MODEL, EXPERTS = "SmolLM2-135M-Instruct", "tiny-experts"
# Of the lines of metrics.jsonl.
KEPT = (
    "loss", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin", "kl_unclamped", "delta", "acc", "auc",
    "grad_norm", "moe_largest_share", "moe_smallest_share",
)  # fmt: skip
SPEED = ("timing/step_time", "perf/tokens_per_sec", "perf/padding_fraction")
FULL = {"model.optim.lr": "8e-5", "model.optim.sched.min_lr": "2e-5"}
LORA = {
    "model.peft.peft_scheme": "lora",
    "model.peft.lora_tuning.adapter_dim": "16",
    "model.optim.lr": "1e-3",
    "model.optim.sched.min_lr": "2e-4",
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A run on the quickstart's model and reviews.

    Attributes:
        title: heading on the page.
        about: one or two sentences: when to use it, and the settings that matter.
        algorithm: kto or dpo.
        keys: overrides beyond those that all runs share.
        model: name of the model's folder.
        steps, batch: number of optimizer steps, and of examples (or pairs) in each.
        only_desirable: leave out the undesirable training rows.
        in_gallery: whether the run has a place on the page of the gallery.
    """

    title: str
    about: str
    algorithm: str
    keys: Mapping[str, str]
    model: str = MODEL
    steps: int = 16
    batch: int = 8
    only_desirable: bool = False
    in_gallery: bool = True

    @property
    def rows(self) -> tuple[str, str]:
        """Names of the files of training and validation rows."""
        if self.only_desirable:
            return "desirable.jsonl", "validation.jsonl"
        return ("rows.jsonl", "validation.jsonl") if self.algorithm == "kto" else ("pairs.jsonl", "pairs_validation.jsonl")

    def overrides(self) -> dict[str, str]:
        """All overrides of the command."""
        train, validation = self.rows
        loop = f"trainer.{self.algorithm}"
        return {
            "model.data.data_prefix": f"{{train: {train}, validation: {validation}}}",
            "trainer.precision": "auto",
            f"{loop}.max_steps": str(self.steps),
            f"{loop}.val_check_interval": str(self.steps // 4),
            f"{loop}.limit_val_batches": str(64 // self.batch),
            f"{loop}.val_before_training": "true",
            f"{loop}.save_interval": "0",
            "model.global_batch_size": str(self.batch),
            "model.optim.weight_decay": "0",
            "model.optim.sched.name": "LinearAnnealing",
            "model.optim.sched.warmup_steps": "2",
            **self.keys,
        }

    def command(self, folder: str) -> list[str]:
        """The command, as one would type it in the folder with model and rows."""
        return ["nemo-kto", self.algorithm, self.model, f"exp_manager.explicit_log_dir={folder}", *self.words()]

    def words(self) -> list[str]:
        """The overrides as words of the command line."""
        return [f"{key}={value}" for key, value in self.overrides().items()]


RUNS = {
    "kto": Configuration(
        title="KTO, all weights",
        about="The standard for responses with a thumb up or down.",
        algorithm="kto",
        keys=FULL,
    ),
    "kto-lora": Configuration(
        title="KTO with LoRA",
        about="Adapters of rank 16 on all linear layers. The reference is the model with its adapters disabled.",
        algorithm="kto",
        keys=LORA,
    ),
    "bco": Configuration(
        title="BCO",
        about="A classifier of good and bad responses, shifted by the mean of all rewards so far. It needs no KL examples.",
        algorithm="kto",
        keys={"model.kto.preference_loss": "bco", **FULL},
    ),
    "apo-zero": Configuration(
        title="APO-zero, unpaired",
        about="KTO with its reference point at zero, for good responses that are better than the model's. "
        "It needs no KL examples.",
        algorithm="kto",
        keys={"model.kto.preference_loss": "apo_zero_unpaired", **FULL},
    ),
    "kto-packed": Configuration(
        title="KTO, packed sequences",
        about="Short responses are concatenated up to 1,024 tokens instead of padded. The result is that of the "
        "first run up to rounding; only the speed differs.",
        algorithm="kto",
        keys={"model.data.packing": "true", "model.micro_batch_tokens": "1024", **FULL},
    ),
    "dpo-lora": Configuration(
        title="DPO with LoRA",
        about="The standard for pairs.",
        algorithm="dpo",
        keys=LORA,
    ),
    "simpo": Configuration(
        title="SimPO",
        about="For pairs, without a reference: rewards are mean log-probs of a token, so beta is larger than for DPO.",
        algorithm="dpo",
        keys={
            "model.dpo.preference_loss": "simpo",
            "model.dpo.ref_policy_kl_penalty": "2",
            **FULL,
        },
    ),
    "orpo": Configuration(
        title="ORPO",
        about="Supervised training on the chosen responses and an odds ratio, without a reference.",
        algorithm="dpo",
        keys={"model.dpo.preference_loss": "orpo", **FULL},
    ),
    "experts": Configuration(
        title="KTO, mixture of experts",
        about="A tiny Qwen3-MoE of random weights: eight experts on two expert-parallel ranks, with a load-balancing loss.",
        algorithm="kto",
        keys={
            "trainer.devices": "2",
            "model.expert_model_parallel_size": "2",
            "model.moe_aux_loss_coeff": "0.01",
            "model.optim.lr": "1e-3",
            "model.optim.sched.min_lr": "2e-4",
        },
        model=EXPERTS,
    ),
    "lr-too-high": Configuration(
        title="Learning rate too high",
        about="Ten times the learning rate of the first run.",
        algorithm="kto",
        keys={"model.optim.lr": "8e-4", "model.optim.sched.min_lr": "2e-4"},
        in_gallery=False,
    ),
    "small-batch": Configuration(
        title="Batch too small",
        about="Two examples a step.",
        algorithm="kto",
        keys=FULL,
        steps=32,
        batch=2,
        in_gallery=False,
    ),
    "one-class": Configuration(
        title="One class only",
        about="The undesirable rows are missing from the training data.",
        algorithm="kto",
        keys=FULL,
        steps=12,
        only_desirable=True,
        in_gallery=False,
    ),
}


def prepare(folder: Path) -> None:
    """Put the models and the rows of all runs into a folder, each under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    script = [sys.executable, str(REPOSITORY / "examples/quickstart/prepare.py"), "--cache", str(folder)]
    for flags, names in (([], ("rows", "validation")), (["--pairs"], ("pairs", "pairs_validation"))):
        printed = subprocess.run([*script, *flags], check=True, capture_output=True, text=True).stdout.splitlines()
        for name, file in zip(names, printed[-2:], strict=True):
            shutil.copyfile(file, folder / f"{name}.jsonl")
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "desirable.jsonl").write_text("".join(line for line in lines if json.loads(line)["label"]))
    if not (folder / EXPERTS).exists():
        make_experts(folder / EXPERTS, tokenizer=folder / MODEL)


def make_experts(folder: Path, *, tokenizer: Path) -> None:
    """Write a Qwen3-MoE of random weights: four layers of eight experts, two for each token."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    config = Qwen3MoeConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        eos_token_id=words.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)


def run(configuration: Configuration, *, name: str, folder: Path) -> dict[str, Any]:
    """Train, and return what the figures need of the run's metrics."""
    out = folder / "runs" / name
    shutil.rmtree(out, ignore_errors=True)
    command = configuration.command(f"runs/{name}")
    program = Path(sys.executable).with_name("nemo-kto")
    own = ["export.enabled=false", "exp_manager.create_tensorboard_logger=false", "model.data.cache_dir=cache"]
    cpu, began = _child_seconds(), time.monotonic()
    subprocess.run(
        [str(program), *command[1:], *own],
        cwd=folder,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    seconds, cpu = time.monotonic() - began, _child_seconds() - cpu
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "command": shlex.join(command),
        "seconds": round(seconds),
        "cpu_seconds": round(cpu),
        **{source: _series(lines, source) for source in ("train", "val")},
        "speed": {key: _median([line[key] for line in lines if key in line]) for key in SPEED},
    }


def _series(lines: list[dict[str, float]], source: str) -> dict[str, list[float]]:
    """The kept metrics of training or validation, and their steps; a metric that is missing somewhere is left out."""
    of_source = [line for line in lines if f"{source}/loss" in line]
    found = {"step": [line["step"] for line in of_source]}
    for key in KEPT:
        if values := [line[f"{source}/{key}"] for line in of_source if f"{source}/{key}" in line]:
            found |= {key: [float(f"{value:.5g}") for value in values]} if len(values) == len(of_source) else {}
    return found


def _median(values: list[float]) -> float:
    return float(f"{sorted(values)[len(values) // 2]:.3g}")


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the configurations of the gallery on this machine.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    arguments = parser.parse_args()
    prepare(arguments.folder)
    for name in arguments.names or RUNS:
        result = run(RUNS[name], name=name, folder=arguments.folder)
        (DATA / f"{name}.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
