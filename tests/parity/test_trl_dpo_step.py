"""numerics.md, point 4: whole optimizer steps of TRL 1.5.1's DPOTrainer, from the same checkpoints and the same pairs.

Ours are the whole job: the rows' file, the configuration, the reference and the optimizer as the command line builds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_pairs

pytestmark = pytest.mark.parity

STEPS, PAIRS, BETA = 3, 6, 0.1
MAX_GRAD_NORM = 0.5  # below the gradients' norm: clipping is compared too
COMPARED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "rewards/accuracies": "acc",
    "rewards/chosen": "rewards_chosen_mean",
    "rewards/rejected": "rewards_rejected_mean",
    "rewards/margins": "rewards_margin",
    "logps/chosen": "logps_chosen_mean",
    "logps/rejected": "logps_rejected_mean",
}


def trl_steps(
    policy: Path, reference: Path, pairs: list[dict[str, str]], loss: str, lr: float, out: Path
) -> list[dict[str, float]]:
    """What TRL logs at each step, of which each takes all pairs."""
    trl = pytest.importorskip("trl", reason="TRL 1.5.1 is the oracle")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype="float32"),
        ref_model=AutoModelForCausalLM.from_pretrained(reference, dtype="float32"),
        args=trl.DPOConfig(
            output_dir=str(out),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            loss_type=[loss],
            beta=BETA,
            per_device_train_batch_size=len(pairs),
            max_steps=STEPS,
            learning_rate=lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=AutoTokenizer.from_pretrained(policy),
        train_dataset=Dataset.from_list(pairs),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def our_steps(policy: Path, reference: Path, rows: Path, folder: Path, overrides: list[str]) -> None:
    """The same run of ours, on this rank."""
    from nemo_kto.config import compose
    from nemo_kto.config.resolved import ResolvedRun
    from nemo_kto.run import build

    settings = [
        f"pretrained_checkpoint.restore_from_path={policy}",
        f"model.reference.restore_from_path={reference}",
        "model.reference.mode=swap",
        f"model.data.data_prefix={rows}",
        "model.data.splits_string=null",
        f"model.data.cache_dir={folder}/cache",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "export.enabled=false",
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        f"trainer.dpo.max_epochs={STEPS}",
        f"trainer.dpo.gradient_clip_val={MAX_GRAD_NORM}",
        f"model.global_batch_size={PAIRS}",
        "model.micro_batch_size=2",
        f"model.dpo.ref_policy_kl_penalty={BETA}",
        "model.optim.betas=[0.9,0.999]",
        "model.optim.weight_decay=0",
        "model.optim.sched.name=constant",
        "model.optim.sched.warmup_steps=0",
    ]
    cfg, problems = compose.to_config(compose.load([*settings, *overrides], source=compose.Source(config_name="gpt_dpo")))
    assert cfg is not None, problems
    build.train(ResolvedRun.of(cfg))


def assert_same_steps(
    ranks: RankPool, policy: Path, reference: Path, folder: Path, *, loss: str, lr: float, tensor_parallel: int = 1
) -> None:
    pairs = [
        {"prompt": f"{pair['prompt']}:", "chosen": f" {pair['chosen']}", "rejected": f" {pair['rejected']}"}
        for pair in make_pairs(PAIRS)
    ]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    ours_of = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"}
    overrides = [f"model.dpo.preference_loss={ours_of[loss]}", f"model.tensor_model_parallel_size={tensor_parallel}"]
    overrides += [f"model.optim.lr={lr}", f"model.optim.sched.min_lr={lr}"]
    if loss == "ipo":  # TRL takes means over tokens there, and logs sums
        overrides.append("model.dpo.preference_average_log_probs=true")
    theirs = trl_steps(policy, reference, pairs, loss, lr, folder / "trl")
    ranks.run(tensor_parallel, our_steps, policy, reference, rows, folder / "ours", overrides)
    logged = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    ours: list[dict[str, Any]] = [row for row in logged if "train/loss" in row]

    assert len(ours) == len(theirs) == STEPS
    assert min(step["grad_norm"] for step in theirs) > MAX_GRAD_NORM
    assert abs(theirs[0]["rewards/margins"]) > 1e-3, "the reference is another model from the first step on"
    for our_step, their_step in zip(ours, theirs, strict=True):
        for their_name, our_name in COMPARED.items():
            if loss != "ipo" or their_name in ("loss", "grad_norm"):
                expected = pytest.approx(their_step[their_name], rel=1e-4, abs=1e-6)
                assert our_step[f"train/{our_name}"] == expected, their_name


@pytest.mark.parametrize(
    ("loss", "tensor_parallel"),
    [
        ("sigmoid", 2),
        ("ipo", 1),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("sigmoid", 1), ("hinge", 1), ("hinge", 2), ("ipo", 2))),
    ],
)
def test_whole_steps(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], tmp_path: Path, loss: str, tensor_parallel: int
) -> None:
    policy, reference = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    assert_same_steps(ranks, policy, reference, tmp_path, loss=loss, lr=2e-4, tensor_parallel=tensor_parallel)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whole_steps_of_a_real_model(ranks: RankPool, smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2-135M against a reference that is itself, moved a little."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += 0.02 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "reference")
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(tmp_path / "reference")
    assert_same_steps(ranks, smollm2, tmp_path / "reference", tmp_path, loss="sigmoid", lr=2e-6)
