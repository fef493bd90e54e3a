"""Complete runs with mixture-of-experts models: one trajectory at every layout, and resumed at other layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.models.test_load_balance import make_sequences
from tests.helpers import lora_jobs
from tests.helpers.engines import engine
from tests.helpers.hf_models import weights
from tests.helpers.job_cache import JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import assert_same, length, trajectory

TP2 = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]
EP2, WHOLE_EXPERTS = "model.expert_model_parallel_size=2", "model.expert_tensor_parallel_size=1"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one_rank": (1, []),
    "micro_batch_1": (1, ["model.micro_batch_size=1"]),
    "recompute": (1, ["model.activations_checkpoint_granularity=selective"]),
    "ep2": (2, [EP2]),
    "ep2_replicated_optimizer": (2, [EP2, "model.optim.use_distributed_optimizer=false"]),
    "tp2_ep2_whole_experts": (2, [*TP2, EP2, WHOLE_EXPERTS]),
    "ep2_90_tokens": (2, [EP2, "model.micro_batch_size=null", "model.micro_batch_tokens=90"]),
    "ep2_overlap": (2, [EP2, "model.optim.overlap=true"]),
    "tp2_ep2": (4, [*TP2, EP2]),
    "pp2_ep2": (4, ["model.pipeline_model_parallel_size=2", EP2]),
    "pp2_vp2_ep2": (4, ["model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2", EP2]),
    "cp2_ep2": (4, ["model.context_parallel_size=2", EP2]),
    "ep4": (4, ["model.expert_model_parallel_size=4"]),
    "dp2": (2, []),
}
ROWS = ["model.data.packing=true", "model.micro_batch_size=null", "model.micro_batch_tokens=180"]
LAYOUTS |= {"packed_ep2": (2, [EP2, *ROWS]), "packed_cp2_ep2": (2, ["model.context_parallel_size=2", EP2, *ROWS])}
LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.adapter_dim=4",
    "model.reference.mode=adapter",
    "model.optim.lr=5e-3",
]
TARGETS = "model.peft.lora_tuning.target_modules"
# A token with nearly equal scores of two experts may choose the other one after a step that was rounded differently: about
# one choice in 10,000 after three steps, where scores differ by 3e-6. One such token moves the mean margin by 1e-4.
NEAR_TIES = 1e-3
BALANCE = "model.moe_aux_loss_coeff=0.02"
# Name of a run: the algorithm, the family, the overrides.
RUNS: dict[str, tuple[str, str, list[str]]] = {
    "kto": ("kto", "mixtral", [BALANCE]),
    "dpo": ("dpo", "qwen3_moe", [BALANCE]),
    "kto_corrected": ("kto", "glm4_moe", [BALANCE]),  # experts in groups, chosen by corrected sigmoid scores
    "kto_states": ("kto", "qwen3_next", [BALANCE]),  # gated delta nets in half of the layers
    "dpo_states_lora": ("dpo", "qwen3_next", [*LORA, f"{TARGETS}=[attention]"]),
    # layers of one part; chunks that begin at the end of a shared prompt round differently from those of whole sequences
    "kto_mamba": ("kto", "nemotron_h", [BALANCE, "model.data.share_prompts=false"]),
    "kto_mamba_everywhere": ("kto", "granitemoehybrid", [BALANCE, "model.data.share_prompts=false"]),
    "kto_sinks": ("kto", "gpt_oss", [BALANCE]),
    "kto_lora": ("kto", "qwen2_moe", [*LORA, f"{TARGETS}=[all]", BALANCE]),  # shared experts, and a layer without
    "kto_lora_experts": ("kto", "mixtral", [*LORA, f"{TARGETS}=[mlp]"]),  # nothing else is trained
    "kto_synced": ("kto", "qwen2_moe", ["model.reference.sync_interval=1"]),
    "llama4": ("kto", "llama4_text", [BALANCE]),  # sequences of several chunks of attention
    "llama4_lora": ("dpo", "llama4_text", [*LORA, f"{TARGETS}=[all]", BALANCE]),
    "dpo_lora": ("dpo", "mixtral", [*LORA, f"{TARGETS}=[attention]"]),
}
QUICK = [("kto", "packed_ep2", 3), ("kto_lora", "tp2_ep2_whole_experts", 2), ("kto_corrected", "pp2_ep2", 2)]
OF_OTHER_RUNS = ("ep2", "tp2_ep2_whole_experts", "pp2_ep2", "packed_ep2", "packed_cp2_ep2")
EVERY_CASE = [
    *((run, layout) for run in RUNS for layout in (LAYOUTS if run == "kto" else OF_OTHER_RUNS) if layout != "one_rank"),
    ("kto_lora", "ep2_overlap"),
    ("kto_sinks", "tp2_ep2"),
]
CASES = [*QUICK, *(pytest.param(*case, 10, id=f"{'-'.join(case)}-10", marks=pytest.mark.full) for case in EVERY_CASE)]


def job(name: str, layout: str, steps: int) -> dict[str, Any]:
    """Arguments of :class:`JobCache`: checkpoints of every second step, and an export."""
    (world_size, of_layout), (algorithm, family, of_run) = LAYOUTS[layout], RUNS[name]
    given = [
        "model.micro_batch_size=4",
        *of_run,
        *of_layout,
        *length(algorithm, steps),
        f"trainer.{algorithm}.save_interval=2",
    ]
    given += ["model.global_batch_size=8"] if steps < 10 else []
    given += ["exp_manager.checkpoint_callback_params.save_top_k=-1", "export.enabled=true"]
    # four for two stages of two chunks, or for a first layer without experts
    layers = 4 if name in ("kto", "kto_corrected", "kto_mamba", "kto_mamba_everywhere") else 2
    return {"algorithm": algorithm, "overrides": given, "world_size": world_size, "family": family, "layers": layers}


@pytest.mark.parametrize(("name", "layout", "steps"), CASES)
def test_same_trajectory(name: str, layout: str, steps: int, jobs: JobCache) -> None:
    ours, expected = (trajectory(jobs(**job(name, each, steps))) for each in (layout, "one_rank"))
    assert expected[0]["train/moe_aux_loss"] > 1.05, "experts must be chosen unevenly, or their number proves nothing"
    assert expected[-1]["val/rewards_margin"] > 0.05, "the policy must move, or equality proves nothing"
    assert_same(ours, expected, steps=steps, later=NEAR_TIES)


MOVES = [("ep2", "one_rank"), ("one_rank", "tp2_ep2_whole_experts"), ("tp2_ep2", "pp2_ep2"), ("pp2_ep2", "ep4")]


@pytest.mark.parametrize(
    ("name", "before", "after", "steps"),
    [
        pytest.param("kto", "ep2", "ep2", 3, marks=pytest.mark.full),
        ("kto", "packed_ep2", "tp2_ep2_whole_experts", 3),
        *(pytest.param("kto", *move, 5, marks=pytest.mark.full) for move in MOVES),
        *(pytest.param(run, *MOVES[0], 5, marks=pytest.mark.full) for run in RUNS if run not in ("kto", "dpo_lora")),
        pytest.param("kto", "ep2_replicated_optimizer", "ep2_replicated_optimizer", 5, marks=pytest.mark.full),
    ],
)
def test_resumed(name: str, before: str, after: str, steps: int, jobs: JobCache, tmp_path: Path) -> None:
    uninterrupted, last = jobs(**job(name, before, steps)), f"step_{steps:06d}"
    given, expected = job(name, after, steps), trajectory(uninterrupted)
    stop = 2
    shutil.copytree(uninterrupted / "checkpoints" / f"step_{stop:06d}", tmp_path / "checkpoints" / f"step_{stop:06d}")
    shutil.copy(uninterrupted / "metrics.jsonl", tmp_path)
    ours = trajectory(jobs.start(tmp_path, **given))
    assert (tmp_path / "checkpoints" / last).is_dir(), "the copied log has all lines without any training"
    if before == after:
        assert ours == expected, "bitwise"
        return
    assert ours[:stop] == expected[:stop]
    assert ours[stop:] != expected[stop:], "later steps were recomputed with other rounding"
    assert_same(ours[stop:], expected[stop:], steps=steps - stop, first=NEAR_TIES, later=NEAR_TIES)


def test_the_correction_bias_is_not_trained(jobs: JobCache, tiny_checkpoint: Callable[..., Path]) -> None:
    run, model = jobs(**job("kto_corrected", "pp2_ep2", 2)), tiny_checkpoint("glm4_moe", num_hidden_layers=4)
    before, after = weights(model), weights(run / "hf")
    assert before.keys() == after.keys()
    same = {name for name, values in before.items() if torch.equal(values, after[name])}
    assert same == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}


def unevenly_shared(model: Path, counts: list[int], expert_parallel: int) -> tuple[list[float], int, int]:
    """On a rank: log-probs of its sequences, of which another rank may have more; tokens that it counts, and carries."""
    from megatron.core import parallel_state

    from nemo_kto.distributed import state
    from nemo_kto.models.flops import Passes

    chunks, architecture = lora_jobs.build(model, state.Layout(expert=expert_parallel), distributed=False)
    first = sum(counts[: parallel_state.get_data_parallel_rank()])
    mine = slice(first, first + counts[parallel_state.get_data_parallel_rank()])
    runs, sequences = engine(chunks, architecture), make_sequences(1, mine)
    logps = runs.logprobs(sequences)
    assert runs.logprobs(make_sequences(1, slice(0, 0))).shape == (0,), "no rank has one"
    carried = sum(each.tokens_bs.numel() for each in runs._micro_batches(sequences, runs.limits))
    return logps.tolist(), int(runs.work_sums(sequences, passes=Passes(forward=1))["padded_tokens"]), carried


def test_a_rank_without_sequences_participates(tiny_checkpoint: Callable[..., Path], ranks: RankPool) -> None:
    folder = tiny_checkpoint("mixtral")
    ((expected, _, _),) = ranks.run(1, unevenly_shared, folder, [8], 1)
    (first, *of_first), (second, *of_second) = ranks.run(2, unevenly_shared, folder, [8, 0], 2)
    assert second == []
    assert first == pytest.approx(expected, rel=1e-5)
    assert of_first[0] == of_first[1] > of_second[0] == of_second[1] == 4, "four without sequences, of one token each"


def test_an_export_equals_the_checkpoint(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], jobs: JobCache, tmp_path: Path
) -> None:
    """The model is written by ranks that share out the experts, and by one that has them all."""
    from nemo_kto.run.policy import export_checkpoint

    run = jobs(**job("kto", "packed_ep2", 3))
    ranks.run(1, export_checkpoint, run, tmp_path)
    first, again, before = (
        weights(folder) for folder in (run / "hf", tmp_path, tiny_checkpoint("mixtral", num_hidden_layers=4))
    )
    assert first.keys() == again.keys() == before.keys()
    assert all(torch.equal(values, again[name]) for name, values in first.items())
    assert not [name for name, values in first.items() if torch.equal(values, before[name])], "every expert is trained"
