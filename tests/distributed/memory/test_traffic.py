"""Communication of a step against counts on real ranks, and the logged model FLOPs utilisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.memory.rank_memory import Training
from nemo_kto.memory.run_plan import Step
from nemo_kto.tools.plan.speed import step_traffic
from tests.helpers import training_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import train

WIDTH, ROWS, MICRO_BATCH = 64, 16, 4
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]
DISABLED = "model.reference.mode=adapter"


ALL, DORA = (LoRASettings(rank=4, alpha=4, target_modules=("all",), dora=dora) for dora in (False, True))
ADAPTED = [*LORA, "model.peft.lora_tuning.target_modules=[all]"]
EP2, SHARDS = "model.expert_model_parallel_size=2", "model.sequence_parallel=true"
INSTANCES = "model.optim.num_distributed_optimizer_instances=2"
# Ranks; tensor, pipeline and context parallel; further arguments of the formula and the run.
CASES: dict[str, tuple[int, tuple[int, int, int], dict[str, Any], list[str]]] = {
    "tp2": (2, (2, 1, 1), {}, []),
    "cp2": (2, (1, 1, 2), {}, []),
    "cp2_delta_nets": (2, (1, 1, 2), {}, []),
    "pp2_dp2": (4, (1, 2, 1), {}, []),
    "tp2_cp2": (4, (2, 1, 2), {}, []),
    "dp4_of_2_instances": (4, (1, 1, 1), {"optimizer_instances": 2}, [INSTANCES]),
    "pp2_vp2": (2, (1, 2, 1), {"chunks": 2}, ["model.virtual_pipeline_model_parallel_size=2"]),
    "tp2_ep2_whole_experts_lora": (
        2,
        (2, 1, 1),
        {"sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 1, "adapters": ALL, "disabled": 2},
        [SHARDS, EP2, "model.expert_tensor_parallel_size=1", *ADAPTED, DISABLED],
    ),
    "sequence_parallel_dora": (
        2,
        (2, 1, 1),
        {"sequence_parallel": True, "adapters": DORA},
        [SHARDS, *ADAPTED, "model.peft.lora_tuning.dora=true"],
    ),
    "ep2_recompute": (
        2,
        (1, 1, 1),
        {"expert_parallel": 2, "recompute": "selective", "recompute_modules": ("mlp",)},
        [EP2, "model.activations_checkpoint_granularity=selective", "model.recompute_modules=[mlp]"],
    ),
}
QUICK = ("tp2", "cp2_delta_nets")  # the second has layers with attention as well
# Collectives that the formula counts per axis; the rest are sums of metrics and similar.
MESSAGES = {
    "tensor": ("allreduce_", "_allgather_base_", "_reduce_scatter_base_"),
    "pipeline": ("send",),
    "embedding": ("allreduce_",),
    "others": ("send",),  # between two stages with several chunks, so that one direction does not wait for the other
    "context": ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"),
    "data": ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_coalesced_"),
    "instances": ("allreduce_coalesced_",),
    "expert": ("alltoall_base_",),
    "expert tensor": ("_allgather_base_", "_reduce_scatter_base_"),
    "expert and tensor": ("_allgather_base_",),
    "expert data": ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_"),
}
# Groups whose messages the formula has in one sum.
PARTS = {
    "pipeline": ("pipeline", "embedding", "others"),
    "data": ("data", "expert data"),
    "expert": ("expert", "expert tensor", "expert and tensor"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With and without experts. All experts see every token, so that the traffic does not depend on the router."""
    folder = tmp_path_factory.mktemp("wide")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 640, "tie_word_embeddings": True}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    experts["shared_expert_intermediate_size"] = 96
    return {
        "tied": make_checkpoint(folder / "tied", "llama", **sizes),
        "delta nets": make_checkpoint(folder / "qwen3_5", "qwen3_5_text", **sizes),
        "experts": make_checkpoint(folder / "qwen2_moe", "qwen2_moe", **sizes, **experts),
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All longer than a row may be."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    kinds = ("chosen", "rejected")
    lines = [{"prompt": "a", "response": "word " * WIDTH, "preference": kinds[number % 2]} for number in range(2 * ROWS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_communication_equals_the_formula(
    name: str, ranks: RankPool, models: dict[str, Path], rows: Path, tmp_path: Path
) -> None:
    count, (tensor, pipeline, context), options, overrides = CASES[name]
    options = dict(options)
    model = models["experts" if "expert_parallel" in options else "delta nets" if "delta" in name else "tied"]
    expert_tensor, disabled = options.pop("expert_tensor_parallel", 1), options.pop("disabled", 0)
    degrees = {"tensor_model": tensor, "pipeline_model": pipeline, "context": context}
    overrides = [
        "model.data.share_prompts=false",
        *overrides,
        *(f"model.{axis}_parallel_size={degree}" for axis, degree in degrees.items()),
    ]
    counter = f"trainer.callbacks=[{{_target_: tests.distributed.memory.traffic.CountStep, folder: {tmp_path}}}]"
    length = ["trainer.kto.max_steps=2", "trainer.kto.limit_val_batches=0", f"model.micro_batch_size={MICRO_BATCH}"]
    ranks.run(count, train, model, rows, tmp_path / "run", count, [*overrides, *length, counter])
    data = count // (tensor * pipeline * context)
    micro_batches = ROWS // data // MICRO_BATCH
    training = Training(
        architecture=read_architecture(model, tensor_parallel=tensor, expert_tensor_parallel=expert_tensor),
        element_bytes=4,
        split=PipelineSplit(stages=pipeline, chunks=options.pop("chunks", 1)),
        context_parallel=context,
        data_parallel=data,
        micro_batch_tokens=MICRO_BATCH * WIDTH,
        micro_batch_width=WIDTH,
        micro_batches=micro_batches,
        logprob_chunk=1024,
        on_gpu=False,
        **options,
    )
    prompt = len(AutoTokenizer.from_pretrained(model)("a")["input_ids"])
    # KL, and two of the reference, which is swapped or the model with its adapters disabled
    step = Step(
        rows=ROWS, width=WIDTH, micro_batches=micro_batches, answer=WIDTH - prompt, forward_only=3, disabled=disabled
    )
    for rank in range(count):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        wanted = step_traffic(training, step, stage=found["stage"])
        for axis in ("tensor", "pipeline", "context", "data", "instances", "expert"):
            sent_by = [(part, each) for part in PARTS.get(axis, (axis,)) for each in MESSAGES[part]]
            sent = sum(found["sent"].get(part, {}).get(each, 0.0) for part, each in sent_by)
            assert sent == pytest.approx(getattr(wanted, axis), rel=0.02), (rank, axis, found)


def test_flops_of_a_step(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    """With samples S and KL examples K: 4 S + 2 K with a live reference, 3 S + K with a cached one, 5 S for BCO."""

    def flops(case: str, *overrides: str) -> float:
        short = ["trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=0", *overrides]
        short.append(f"model.data.cache_dir={tmp_path / 'cache'}")
        ranks.run(1, training_jobs.train_with_known_peak, tiny_llama, kto_rows, tmp_path / case, 1, short, "kto")
        (step,) = training_jobs.flops(tmp_path / case, 1)
        return step

    swap, cached = flops("swap"), flops("cached", "model.reference.mode=cached")
    samples = flops("bco", "model.kto.preference_loss=bco") / 5
    kl_examples = cached - 3 * samples
    assert 0.9 < kl_examples / samples < 1.1, "responses of about the same lengths"
    assert swap == pytest.approx(4 * samples + 2 * kl_examples, rel=1e-9)
