"""numerics.md, point 2: one trajectory for every layout, micro-batch size, recomputation and optimizer sharding.

Every case is the whole job: configuration, data, reference, steps, through the builder the command line uses. All of them
are held against one rank with a micro-batch of 4. Ten steps, as numerics.md asks, are taken by every case of the full
matrix, and three by those of the quick one. Each run validates on two sets, logs its FLOPs, saves and exports, so that all
of this is compared as well.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.hf_models import weights
from tests.helpers.job_cache import JobCache
from tests.helpers.training_jobs import assert_same, flops, length, tour, trajectory

# The overrides of each part of a layout's name, with its number.
PARTS = {
    r"tp(\d)": ["model.tensor_model_parallel_size={}"],
    r"cp(\d)": ["model.context_parallel_size={}"],
    r"pp(\d)": ["model.pipeline_model_parallel_size={}"],
    r"vp(\d)": ["model.virtual_pipeline_model_parallel_size={}"],
    r"(sequence_parallel)": ["model.sequence_parallel=true"],
    r"(uneven)": ["model.num_layers_in_last_pipeline_stage=1"],
    r"(?<!forward_)micro_batch_(\d)": ["model.micro_batch_size={}"],
    r"forward_micro_batch_(\d)": ["model.{algorithm}.log_prob_forward_micro_batch_size={}"],
    r"(\d+)_tokens": ["model.micro_batch_size=null", "model.micro_batch_tokens={}"],
    r"(packed)": ["model.data.packing=true", "model.micro_batch_size=null", "model.micro_batch_tokens=180"],
    r"logprob_chunks_of_(\d)": ["model.logprob_chunk_size={}"],
    r"recompute_(\w+)": ["model.activations_checkpoint_granularity={}"],
    r"recompute_(full)": ["model.activations_checkpoint_method=uniform", "model.activations_checkpoint_num_layers=1"],
    r"(replicated)_optimizer": ["model.optim.use_distributed_optimizer=false"],
    r"of_(\d)_optimizer_instances": ["model.optim.num_distributed_optimizer_instances={}"],
    r"(one_rank)": ["model.data.share_prompts=false"],  # all others without context parallelism share them
}
LAYOUTS = (
    "tp2 tp4 pp2 dp2 dp2_replicated_optimizer dp4 dp4_of_2_optimizer_instances tp2_pp2 tp2_dp2 pp2_dp2 "
    "tp2_sequence_parallel tp2_pp2_sequence_parallel cp2 cp4 cp2_dp2 cp2_dp2_replicated_optimizer cp2_pp2 "
    "cp2_tp2_sequence_parallel cp2_tp2_90_tokens cp2_tp2_pp2_sequence_parallel cp2_pp2_vp2 cp2_recompute_full pp2_vp2 "
    "pp2_vp2_dp2 pp2_vp2_dp2_90_tokens packed_pp2_vp2_dp2 pp2_vp2_replicated_optimizer tp2_pp2_vp2_sequence_parallel "
    "pp2_vp2_recompute_full pp2_uneven micro_batch_1 micro_batch_2 micro_batches_of_90_tokens "
    "tp2_dp2_sequence_parallel_90_tokens tp2_pp2_90_tokens packed packed_pp2 packed_dp2 packed_tp2_pp2 "
    "packed_tp2_dp2_sequence_parallel packed_cp2 packed_cp2_dp2 packed_cp2_tp2_sequence_parallel packed_recompute_full "
    "forward_micro_batch_3 tp2_pp2_micro_batch_1 logprob_chunks_of_5 recompute_full recompute_selective"
).split()


def ranks_of(layout: str) -> int:
    return math.prod(int(number) for number in re.findall(r"(?:tp|cp|pp|dp)(\d)", layout))


LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.target_modules=[all]",
    "model.peft.lora_tuning.adapter_dim=4",
    "model.reference.mode=adapter",
    "model.optim.lr=5e-3",
]
ORPO = [  # as TRL has it: the SFT term is one mean over the tokens of prompts and chosen responses
    "model.dpo.preference_loss=orpo",
    "model.reference.mode=auto",
    "model.dpo.orpo_sft_weight=0",
    "model.dpo.sft_loss_weight=1.0",
    "model.dpo.sft_token_mean=true",
    "model.dpo.sft_completion_only=false",
]
MIXTURE = [  # all that changes log-probs or weights of pairs
    "model.dpo.preference_losses={dpo: 0.8, bco_pair: 0.2}",
    "model.dpo.f_divergence_type=alpha_divergence",
    "model.dpo.ld_alpha=0.5",
    "model.dpo.use_weighting=true",
    "model.dpo.sft_loss_weight=0.01",
    "model.dpo.sft_completion_only=false",
]
# Name of a run: the algorithm, the overrides, and the first loss if it follows from policy and reference being equal.
RUNS: dict[str, tuple[str, list[str], float | None]] = {
    "kto": ("kto", [], 0.5),
    "dpo": ("dpo", ["model.dpo.sft_loss_weight=0.01", "model.dpo.label_smoothing=0.1"], math.log(2)),
    "bco": ("kto", ["model.kto.preference_loss=bco"], math.log(2)),
    "aot": ("dpo", ["model.dpo.preference_loss=aot"], math.log(2)),
    "aot_unpaired": ("dpo", ["model.dpo.preference_loss=aot_unpaired"], math.log(2)),
    "simpo": ("dpo", ["model.dpo.preference_loss=simpo", "model.reference.mode=auto"], None),
    "orpo": ("dpo", ORPO, None),
    "cpo": (
        "dpo",
        ["model.dpo.preference_losses={cpo: 1.0, hinge: 0.5}", "model.dpo.reference_free=true", "model.reference.mode=auto"],
        None,
    ),
    "mixture": ("dpo", MIXTURE, None),
    "rpo": ("dpo", ["model.dpo.preference_loss=rpo_bwd_kl", "model.dpo.gt_reward_scale=2.0"], None),
    "lora": ("kto", LORA, 0.5),
    "lora_dpo": ("dpo", LORA, math.log(2)),
    "dora": ("kto", [*LORA, "model.peft.lora_tuning.dora=true"], 0.5),
}
EVERY_CASE = [
    (run, layout)
    for run, layouts in {
        "kto": " ".join(LAYOUTS),
        "dpo": "tp2 cp2 cp2_dp2 cp2_tp2_sequence_parallel cp2_tp2_pp2_sequence_parallel dp4 tp2_pp2 tp2_sequence_parallel "
        "pp2_vp2 pp2_vp2_dp2_90_tokens pp2_uneven micro_batch_1 tp2_pp2_90_tokens packed packed_cp2 "
        "packed_tp2_dp2_sequence_parallel forward_micro_batch_3 recompute_full",
        "bco": "tp2 pp2 dp2 cp2 tp2_pp2 pp2_dp2 micro_batch_1 micro_batch_2 packed_dp2",
        "aot": "tp2 dp2 pp2_dp2 cp2_dp2 micro_batch_1 micro_batch_2 packed_dp2",
        "aot_unpaired": "tp2 dp2 pp2_dp2 cp2_dp2 micro_batch_1 micro_batch_2 packed_dp2",
        "simpo": "tp2_pp2 cp2_pp2",
        "orpo": "tp2_pp2 dp2 packed_cp2_dp2 micro_batch_1",
        "cpo": "tp2 pp2 dp2 packed_dp2",
        "mixture": "tp2 pp2 dp2 cp2 packed packed_tp2_dp2_sequence_parallel micro_batch_1 tp2_pp2_90_tokens",
        "rpo": "pp2_dp2 cp2_dp2",
        "lora": "tp2 tp4 pp2 dp2 tp2_pp2 tp2_pp2_sequence_parallel recompute_full cp2 cp2_tp2_sequence_parallel packed_dp2 "
        "cp2_tp2_pp2_sequence_parallel packed_tp2_pp2 pp2_vp2 pp2_vp2_dp2_90_tokens pp2_vp2_recompute_full pp2_uneven",
        "lora_dpo": "cp2 packed_cp2_dp2 tp2_pp2 pp2_vp2_dp2 pp2_uneven micro_batch_1 packed_pp2 packed_pp2_vp2_dp2 "
        "forward_micro_batch_3",
        "dora": "tp2_pp2_sequence_parallel tp2 pp2 cp2_tp2_sequence_parallel packed_dp2 pp2_vp2_recompute_full",
    }.items()
    for layout in layouts.split()
]
# The cases of the quick matrix, which take three steps; in the full one all cases take ten.
QUICK = [("kto", "pp2_vp2_dp2_90_tokens"), ("kto", "tp2_sequence_parallel"), ("dpo", "packed_cp2"), ("lora", "pp2_vp2")]
CASES = [
    *(pytest.param(*case, 3, id=f"{'-'.join(case)}-3") for case in QUICK),
    *(pytest.param(*case, 10, id=f"{'-'.join(case)}-10", marks=pytest.mark.full) for case in EVERY_CASE),
]


def job(name: str, layout: str, steps: int) -> dict[str, Any]:
    """Arguments of :class:`JobCache`: two validation sets, a checkpoint of the second step, and an export."""
    algorithm, of_run, _ = RUNS[name]
    of_layout = [
        text.format(number, algorithm=algorithm)
        for part, texts in PARTS.items()
        for number in re.findall(rf"(?<![a-z]){part}", layout)
        for text in texts
    ]
    overrides = ["model.micro_batch_size=4", *of_run, *of_layout, *length(algorithm, steps)]
    return {"algorithm": algorithm, "overrides": overrides, "world_size": ranks_of(layout), "layers": 4, "run": tour}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, 3) for name in dict.fromkeys(name for name, _ in QUICK)),
        *(
            pytest.param(name, 10, marks=pytest.mark.full) for name in RUNS if name not in ("orpo", "cpo")
        ),  # no margin by then
    ],
)
def test_training_starts_at_the_reference_and_learns(name: str, number: int, jobs: JobCache) -> None:
    steps, (_, _, first_loss) = trajectory(jobs(**job(name, "one_rank", number))), RUNS[name]
    assert len(steps) == number
    assert all(f"val/{each}_loss" in step for step in steps[min(number, 5) - 1 :: 5] for each in ("first", "second"))
    assert steps[-1]["val/first_rewards_margin"] > 0.05, "the policy must move, or equality proves nothing"
    assert steps[-1]["val/first_loss"] != pytest.approx(steps[-1]["val/second_loss"], rel=1e-3)
    if name != "simpo":
        assert steps[0]["train/rewards_all_mean"] == pytest.approx(0.0, abs=1e-6)
        for anchor in ("kl", "delta"):
            assert steps[0].get(f"train/{anchor}", 0.0) == pytest.approx(0.0, abs=1e-6)
    if first_loss is not None:
        assert steps[0]["train/preference_loss"] == pytest.approx(first_loss, abs=1e-6)


def counted_rewards(folder: Path) -> int:
    """The number of rewards in the histograms of all validations."""
    lines = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    return sum(sum(counts) for line in lines for counts in line.values() if isinstance(counts, list))


def extreme_rewards(folder: Path) -> dict[tuple[str, bool, str], float]:
    """The rewards of the most extreme rows at the last validation, by validation set, end and row.

    A job of another worker has read the same rows from another folder.
    """
    lines = [json.loads(line) for line in (folder / "extremes.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["step"] == lines[-1]["step"]]
    return {(line["set"], line["best"], Path(line["row"]).name): line["reward"] for line in last}


@pytest.mark.parametrize(("name", "layout", "steps"), CASES)
def test_same_trajectory(name: str, layout: str, steps: int, jobs: JobCache) -> None:
    """FLOPs are equal too, and the exported model is equal up to rounding."""
    folder, one_rank = (jobs(**job(name, each, steps)) for each in (layout, "one_rank"))
    ours, expected = trajectory(folder), trajectory(one_rank)
    if layout == "forward_micro_batch_3":
        # The reference is evaluated in other micro-batches than the policy, and a matrix product of another shape may round
        # otherwise. Rewards of the first step are 0 but for that, so that acc, which counts their signs, is undefined.
        ours, expected = (
            [{name: value for name, value in first.items() if name != "train/acc"}, *rest]
            for first, *rest in (ours, expected)
        )
    # DoRA scales each row by magnitude / norm, which is 1 at the first step only up to rounding
    assert_same(ours, expected, steps=steps, first=5e-5 if name == "dora" else 1e-5)
    assert any(key.endswith("_auc") for step in ours for key in step) == (RUNS[name][0] == "kto")
    assert counted_rewards(folder) == counted_rewards(one_rank) > 0
    extremes, of_one_rank = extreme_rewards(folder), extreme_rewards(one_rank)
    same = {row: reward for row, reward in extremes.items() if row in of_one_rank}
    assert len(same) > len(extremes) / 2, "rounding may order two rows of nearly equal rewards otherwise"
    assert same == pytest.approx({row: of_one_rank[row] for row in same}, abs=5e-3)
    assert flops(folder, ranks_of(layout)) == pytest.approx(flops(one_rank, 1), rel=1e-9)
    exported, expected_weights = weights(folder / "hf"), weights(one_rank / "hf")
    assert exported.keys() == expected_weights.keys()
    for weight, values in exported.items():
        # Adam's step does not depend on the size of a gradient: where it is nearly zero, rounding decides the sign.
        moved = (values - expected_weights[weight]).abs()
        assert moved.mean() < 1e-4, weight
        assert moved.max() < 2e-2, weight


@pytest.mark.parametrize(
    ("name", "layout", "steps"),
    [
        (*QUICK[0], 3),
        *(pytest.param(*case, 10, marks=pytest.mark.full) for case in (*QUICK, ("dpo", "cp2"), ("kto", "packed_cp2"))),
    ],
)
def test_a_resumed_run_is_bitwise_equal(name: str, layout: str, steps: int, jobs: JobCache, tmp_path: Path) -> None:
    given, resumed, checkpoint = job(name, layout, steps), tmp_path / "run", Path("checkpoints", "step_000002")
    whole = jobs(**given)
    shutil.copytree(whole / checkpoint, resumed / checkpoint)
    shutil.copy(whole / "metrics.jsonl", resumed)
    jobs.start(resumed, **given)
    assert {checkpoint.name for checkpoint in (resumed / "checkpoints").iterdir()} == {
        checkpoint.name for checkpoint in (whole / "checkpoints").iterdir()
    }
    assert trajectory(resumed) == trajectory(whole)
    expected = weights(whole / "hf")
    assert all(torch.equal(values, expected[weight]) for weight, values in weights(resumed / "hf").items())
