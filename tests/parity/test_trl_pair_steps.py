"""numerics.md, point 4: optimizer steps of TRL 1.16's DPOTrainer and ORPOTrainer, from the same checkpoints and pairs.

Our steps are a complete run: data file, configuration, reference and optimizer as the command line builds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_pairs, write_rows
from tests.helpers.training_jobs import train
from tests.helpers.trl_jobs import BETA, STEPS, assert_same_steps, trl_steps

pytestmark = pytest.mark.parity

PAIRS = 6
LR = 2e-4
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


OUR_NAMES = {"sigmoid": "dpo"}
# Name: fields of TRL's configuration, and our keys. TRL's WPO also weighs its SFT loss, and no f-divergence fits bco_pair.
COMBINED: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "mpo": (
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "ld_alpha": 0.5},
        {"preference_losses": "{dpo: 0.8, bco_pair: 0.2}", "sft_loss_weight": 1, "sft_token_mean": "true", "ld_alpha": 0.5},
    ),
    "wpo": (
        {"loss_type": ["sigmoid"], "use_weighting": True, "f_divergence_type": "js_divergence"},
        {"use_weighting": "true", "f_divergence_type": "js_divergence"},
    ),
    "normed": (  # weighted log-probs divided by all tokens
        {"loss_type": ["sigmoid_norm"], "ld_alpha": 0.5},
        {"preference_loss": "sigmoid_norm", "ld_alpha": 0.5},
    ),
}


def trl_dpo_steps(
    policy: Path, reference: Path, pairs: list[dict[str, str]], folder: Path, *, lr: float, **settings: Any
) -> list[dict[str, Any]]:
    """TRL's DPOTrainer; each step takes all pairs."""
    return trl_steps(
        "trl",
        "DPO",
        policy=policy,
        reference=reference,
        rows=pairs,
        batch=PAIRS,
        lr=lr,
        max_grad_norm=MAX_GRAD_NORM,
        out=folder / "trl",
        **settings,
    )


def our_log(
    ranks: RankPool,
    world_size: int,
    policy: Path,
    reference: Path,
    pairs: list[dict[str, str]],
    folder: Path,
    lr: float,
    overrides: list[str],
) -> list[dict[str, Any]]:
    """The logged training steps of our run on these ranks."""
    settings = [
        *(f"model.reference.restore_from_path={reference}", "model.data.seq_length=512", "trainer.dpo.limit_val_batches=0"),
        *(f"model.global_batch_size={PAIRS}", "model.micro_batch_size=2", f"model.dpo.ref_policy_kl_penalty={BETA}"),
        *(f"model.optim.{each}" for each in (f"lr={lr}", "betas=[0.9,0.999]", "weight_decay=0", "sched.warmup_steps=0")),
        *(f"trainer.dpo.{each}" for each in (f"max_epochs={STEPS}", "max_steps=-1", f"gradient_clip_val={MAX_GRAD_NORM}")),
        f"model.optim.sched.min_lr={lr}",
    ]
    rows = write_rows(folder / "rows.jsonl", pairs)
    ranks.run(world_size, train, policy, rows, folder / "ours", world_size, [*settings, *overrides], "dpo")
    logged = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in logged if "train/loss" in row]


def compare_dpo(
    ranks: RankPool, policy: Path, reference: Path, folder: Path, *, loss: str, lr: float, tensor_parallel: int = 1
) -> None:
    pairs = [
        {"prompt": f"{pair['prompt']}:", "chosen": f" {pair['chosen']}", "rejected": f" {pair['rejected']}"}
        for pair in make_pairs(PAIRS)
    ]
    their_settings, our_settings = COMBINED.get(
        loss, ({"loss_type": [loss]}, {"preference_loss": OUR_NAMES.get(loss, loss)})
    )
    if loss in ("sigmoid", *COMBINED):  # answers of different lengths
        pairs = [pair | {"chosen": pair["chosen"] * (number % 3 + 1)} for number, pair in enumerate(pairs)]
    overrides = [f"model.dpo.{name}={value}" for name, value in our_settings.items()]
    overrides.append(f"model.tensor_model_parallel_size={tensor_parallel}")
    if loss == "ipo":  # TRL takes means over tokens there, and logs sums
        overrides.append("model.dpo.preference_average_log_probs=true")
    theirs = trl_dpo_steps(policy, reference, pairs, folder, lr=lr, **their_settings)
    ours = our_log(ranks, tensor_parallel, policy, reference, pairs, folder, lr, overrides)

    clipped = max if loss in ("wpo", "normed") else min  # weights of pairs, and means, make gradients smaller
    assert clipped(step["grad_norm"] for step in theirs) > (MAX_GRAD_NORM if loss != "normed" else 0)
    assert abs(theirs[0]["rewards/margins"]) > 1e-3, "the reference is another model from the first step on"
    names = {"loss": "loss", "grad_norm": "grad_norm"}
    if loss == "mpo":  # TRL logs the weighted log-probs of LD-DPO
        names = {name: ours for name, ours in COMPARED.items() if not name.startswith("logps")}
    for step in ours if loss == "mpo" else ():
        parts = 0.8 * step["train/dpo_loss"] + 0.2 * step["train/bco_pair_loss"]
        assert step["train/preference_loss"] == pytest.approx(parts, rel=1e-6)
        assert step["train/logps_chosen_mean"] < theirs[0]["logps/chosen"] - 1, "the weighted sum is nearer to 0"
    assert all(("train/wpo_weight_mean" in step) == (loss == "wpo") for step in ours)
    assert_same_steps(ours, theirs, names if loss in ("ipo", "mpo", "normed") else COMPARED)


@pytest.mark.parametrize(
    ("loss", "tensor_parallel"),
    [
        ("sigmoid", 2),
        *(pytest.param(loss, 2, marks=pytest.mark.full) for loss in ("mpo", "wpo")),
        *(pytest.param(loss, tensor, marks=pytest.mark.full) for loss in ("ipo", "hinge", "normed") for tensor in (1, 2)),
        pytest.param("sigmoid", 1, marks=pytest.mark.full),
    ],
)
def test_optimizer_steps(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], tmp_path: Path, loss: str, tensor_parallel: int
) -> None:
    policy, reference = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    compare_dpo(ranks, policy, reference, tmp_path, loss=loss, lr=LR, tensor_parallel=tensor_parallel)


def test_rewards_of_means_and_without_a_reference(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Rewards are beta r, with r as in the loss: TRL logs sums for `sigmoid_norm`, whose r is a mean."""
    policy, reference = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    words = zip("amber birch cedar ember".split(), "delta fjord grove heath".split(), strict=True)
    pairs = [{"prompt": f"{first}:", "chosen": f" {first}", "rejected": f" {second}"} for first, second in words]
    pairs, tokens = [*pairs, *pairs][:PAIRS], len(" amber") + 1
    theirs = trl_dpo_steps(policy, reference, pairs, tmp_path, lr=LR, loss_type=["sigmoid_norm"])
    (tmp_path / "free").mkdir()
    normed = our_log(ranks, 1, policy, reference, pairs, tmp_path, LR, ["model.dpo.preference_loss=sigmoid_norm"])
    no_reference = ["model.dpo.reference_free=true", "model.reference.restore_from_path=null", "model.reference.mode=auto"]
    free = our_log(ranks, 1, policy, reference, pairs, tmp_path / "free", LR, no_reference)
    figures = [name for name in COMPARED if name.startswith(("rewards/c", "rewards/r", "rewards/m", "logps"))]
    assert_same_steps(normed, theirs, {name: name for name in ("loss", "grad_norm")} | {"rewards/accuracies": "acc"})
    for our_step, their_step in zip(normed, theirs, strict=True):
        for name in figures:
            assert tokens * our_step[f"train/{COMPARED[name]}"] == pytest.approx(their_step[name], rel=1e-4, abs=1e-6)
    for side in ("chosen", "rejected"):
        assert free[0][f"train/logps_{side}_mean"] == pytest.approx(theirs[0][f"logps/{side}"], rel=1e-5), "sums"
        assert free[0][f"train/rewards_{side}_mean"] == pytest.approx(BETA * theirs[0][f"logps/{side}"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_optimizer_steps_of_a_real_model(ranks: RankPool, smollm2: Path, tmp_path: Path) -> None:
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
    compare_dpo(ranks, smollm2, tmp_path / "reference", tmp_path, loss="sigmoid", lr=2e-6)


def test_the_load_balancing_loss_of_config_json(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], pairs: list[dict[str, str]], tmp_path: Path
) -> None:
    """TRL adds it although `output_router_logits` is false; here it is not used."""
    policy, reference = (tiny_checkpoint("mixtral", seed=seed, router_aux_loss_coef=0.5) for seed in range(2))
    config = json.loads((policy / "config.json").read_text())
    assert config["output_router_logits"] is False
    theirs = trl_dpo_steps(policy, reference, pairs, tmp_path, lr=LR)
    ours = our_log(ranks, 1, policy, reference, pairs, tmp_path, LR, [])
    assert ours[0]["train/loss"] == pytest.approx(float(theirs[0]["loss"]) - 0.5 * theirs[0]["aux_loss"], rel=1e-4)
    # over all tokens together, and thus nearer to 1 than over those of each sequence
    evenness = theirs[0]["aux_loss"] / config["num_experts_per_tok"]
    assert 1 < evenness < ours[0]["train/moe_aux_loss"] < 1.5


# SFT terms that are one mean over the tokens of the global batch. Answers have different lengths, and each of two
# data-parallel ranks has micro-batches of one pair.
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


def test_orpo(ranks: RankPool, tiny_checkpoint: Callable[..., Path], pairs: list[dict[str, str]], tmp_path: Path) -> None:
    policy = tiny_checkpoint("llama")
    theirs = trl_steps(
        "trl.experimental.orpo",
        "ORPO",
        policy=policy,
        reference=None,
        rows=pairs,
        batch=PAIRS,
        lr=LR,
        max_grad_norm=MAX_GRAD_NORM,
        out=tmp_path / "trl",
    )
    ours = our_log(ranks, 2, policy, policy, pairs, tmp_path, LR, ["model.micro_batch_size=1", *ORPO])
    names = {name: COMPARED[name] for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "logps/rejected")}
    assert_same_steps(ours, theirs, names | {"nll_loss": "sft_loss"})
    for step in ours:  # both are of mean log-probs
        assert step["train/rewards_chosen_mean"] == pytest.approx(BETA * step["train/logps_chosen_mean"], rel=1e-6)


@pytest.mark.full
def test_dpo_with_an_sft_term(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], pairs: list[dict[str, str]], tmp_path: Path
) -> None:
    policy, reference = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    settings = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}
    theirs = trl_dpo_steps(policy, reference, pairs, tmp_path, lr=LR, **settings)
    ours = our_log(ranks, 2, policy, reference, pairs, tmp_path, LR, ["model.micro_batch_size=1", *SFT])
    assert_same_steps(ours, theirs, {name: COMPARED[name] for name in ("loss", "grad_norm", "rewards/margins")})
