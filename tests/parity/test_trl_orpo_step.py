"""Whole optimizer steps of TRL 1.5.1 whose SFT term is one mean over tokens: ORPO, and DPO with the loss type "sft".

The mean is over the tokens of the global batch, whichever rank and micro-batch they are in: answers have unlike lengths.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_pairs
from tests.parity.test_trl_dpo_step import BETA, MAX_GRAD_NORM, PAIRS, STEPS, our_steps

pytestmark = pytest.mark.parity

LR = 2e-4
SHARED = {  # TRL's names of what both trainers are given
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "beta": BETA,
    "max_length": 512,
    "per_device_train_batch_size": PAIRS,
    "max_steps": STEPS,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": MAX_GRAD_NORM,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
ORPO = [
    "model.reference.restore_from_path=null",
    "model.reference.mode=auto",
    "model.dpo.preference_loss=orpo",
    "model.dpo.orpo_sft_weight=0",
    "model.dpo.sft_loss_weight=1.0",
    "model.dpo.sft_token_mean=true",
    "model.dpo.sft_completion_only=false",
]
SFT = ["model.dpo.sft_loss_weight=0.3", "model.dpo.sft_token_mean=true"]


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, str]]:
    return [
        {"prompt": f"{pair['prompt']}:" + " and" * number, "chosen": f" {pair['chosen']}" * (number + 1), "rejected": " no"}
        for number, pair in enumerate(make_pairs(PAIRS))
    ]


def orpo_steps(policy: Path, pairs: list[dict[str, str]], out: Path) -> list[dict[str, float]]:
    """What TRL's ORPOTrainer logs at each step, of which each takes all pairs."""
    orpo = pytest.importorskip("trl.experimental.orpo", reason="TRL 1.5.1 is the oracle")
    return log_of(orpo.ORPOTrainer, orpo.ORPOConfig(output_dir=str(out), **SHARED), policy, pairs)


def dpo_steps(policy: Path, reference: Path, pairs: list[dict[str, str]], out: Path) -> list[dict[str, float]]:
    """The same of its DPOTrainer with an SFT term."""
    from transformers import AutoModelForCausalLM

    trl = pytest.importorskip("trl", reason="TRL 1.5.1 is the oracle")
    settings = trl.DPOConfig(output_dir=str(out), loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3], **SHARED)
    held = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    return log_of(trl.DPOTrainer, settings, policy, pairs, ref_model=held)


def log_of(trainer: Any, settings: Any, policy: Path, pairs: list[dict[str, str]], **models: Any) -> list[dict[str, float]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.pad_token, tokenizer.bos_token = tokenizer.eos_token, None  # ORPOTrainer puts a BOS before every prompt
    running = trainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype="float32"),
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(pairs),
        **models,
    )
    running.train()
    return [entry for entry in running.state.log_history if "loss" in entry]


def our_log(
    ranks: RankPool, policy: Path, reference: Path, pairs: list[dict[str, str]], folder: Path, overrides: list[str]
) -> list[dict[str, float]]:
    """Ours on two data-parallel ranks, a pair in each micro-batch."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = ["model.micro_batch_size=1", f"model.optim.lr={LR}", f"model.optim.sched.min_lr={LR}", *overrides]
    ranks.run(2, our_steps, policy, reference, rows, folder / "ours", ["trainer.devices=2", *settings])
    logged = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in logged if "train/loss" in row]


def assert_same(ours: list[dict[str, float]], theirs: list[dict[str, float]], names: dict[str, str]) -> None:
    assert len(ours) == len(theirs) == STEPS
    for our_step, their_step in zip(ours, theirs, strict=True):
        for their_name, our_name in names.items():
            expected = pytest.approx(float(their_step[their_name]), rel=1e-4, abs=1e-6)
            assert our_step[f"train/{our_name}"] == expected, their_name


def test_orpo(ranks: RankPool, tiny_checkpoint: Callable[..., Path], pairs: list[dict[str, str]], tmp_path: Path) -> None:
    policy = tiny_checkpoint("llama")
    theirs = orpo_steps(policy, pairs, tmp_path / "trl")
    ours = our_log(ranks, policy, policy, pairs, tmp_path, ORPO)
    names = {"loss": "loss", "grad_norm": "grad_norm", "nll_loss": "sft_loss", "rewards/margins": "rewards_margin"}
    assert_same(ours, theirs, names | {"logps/chosen": "logps_chosen_mean", "logps/rejected": "logps_rejected_mean"})


@pytest.mark.full
def test_dpo_with_an_sft_term(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], pairs: list[dict[str, str]], tmp_path: Path
) -> None:
    policy, reference = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    theirs = dpo_steps(policy, reference, pairs, tmp_path / "trl")
    ours = our_log(ranks, policy, reference, pairs, tmp_path, SFT)
    assert_same(ours, theirs, {"loss": "loss", "grad_norm": "grad_norm", "rewards/margins": "rewards_margin"})
