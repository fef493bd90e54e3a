"""At the first step policy and reference are equal, and so are their log-probs, bit for bit, in every reference mode.

The exception is KTO in fp32 with shared prompts, where the reference evaluates a sample together with its KL example.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_cache import JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint, write_rows
from tests.helpers.training_jobs import train

LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4")
ADAPTER = (*LORA, "model.reference.mode=adapter")
TP2, SEQUENCE = "model.tensor_model_parallel_size=2", "model.sequence_parallel"
CACHED = ("model.reference.mode=cached",)
FP32, SHARED, SEPARATE = "trainer.precision=32", "model.data.share_prompts=true", "model.data.share_prompts=false"
PAIRS = "model.kto.preference_loss=apo_zero_unpaired"  # KTO's family, without KL examples


def first_step(model: Path, rows: Path, folder: Path, world_size: int, algorithm: str, overrides: list[str]) -> Any:
    """On a rank: one step, by default in bf16; its log, and the log-ratios of the KL examples of the step on this rank."""
    from nemo_kto.models.nlp.gpt import megatron_gpt_kto_model as kto

    seen: list[float] = []
    original = kto.kl_sums

    def recorded(log_ratios_B: Any, valid_B: Any) -> Any:
        seen.extend(log_ratios_B.tolist())
        return original(log_ratios_B, valid_B)

    settings = [
        "trainer.precision=bf16-forced",
        f"trainer.{algorithm}.max_steps=1",
        f"trainer.{algorithm}.limit_val_batches=0",
        "model.global_batch_size=6",
        "model.micro_batch_size=3",
        "model.data.seq_length=128",
        f"model.data.cache_dir={folder}/cache",
        "model.optim.sched.warmup_steps=0",
        *overrides,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kto, "kl_sums", recorded)
        train(model, rows, folder, world_size, settings, algorithm)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of hidden size 512, prompts of 20 tokens, three rows each, and answers of 40 to 100 tokens."""
    root = tmp_path_factory.mktemp("wide")
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    make_checkpoint(root / "model", "llama", dtype="bfloat16", initializer_range=0.04, **size)
    draw = random.Random(5)

    def answer() -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.randint(40, 100)))

    prompts = [f"{n // 3}: a question of few words" for n in range(12)]
    rated = [{"response": answer(), "preference": "chosen" if n % 2 else "rejected"} for n in range(12)]
    pairs = [{"chosen": answer(), "rejected": answer()} for _ in prompts]
    for name, rows in (("kto", rated), ("dpo", pairs)):
        write_rows(root / f"{name}.jsonl", [{"prompt": prompt, **row} for prompt, row in zip(prompts, rows, strict=True)])
    return root


def case(name: str, *overrides: str, ranks: int = 1, full: bool = True) -> Any:
    return pytest.param(name[:3], overrides, ranks, id=name, marks=[pytest.mark.full] * full)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "world_size"),
    [
        case("kto-swap-shared", SHARED, full=False),
        case("kto-swap-separate", SEPARATE),
        case("kto-cached-shared", *CACHED, SHARED),
        case("kto-cached-separate", *CACHED, SEPARATE),
        case("kto-adapter-shared", *ADAPTER, SHARED),
        case("kto-adapter-separate", *ADAPTER, SEPARATE),
        case("dpo-swap"),
        case("dpo-cached-two-ranks", *CACHED, ranks=2),
        case("dpo-adapter", *ADAPTER),
        case("kto-cached-two-ranks", *CACHED, ranks=2),
        case("kto-cached-tp2", *CACHED, TP2, ranks=2),
        case("kto-adapter-sequence", *ADAPTER, TP2, f"{SEQUENCE}=true", ranks=2),
        case("kto-swap-pp2", "model.pipeline_model_parallel_size=2", ranks=2),
        case("kto-swap-separate-fp32", SEPARATE, FP32, full=False),
        case("kto-cached-separate-fp32", *CACHED, SEPARATE, FP32),
        case("kto-adapter-separate-fp32", *ADAPTER, SEPARATE, FP32),
        case("kto-without-kl-examples-shared-fp32", PAIRS, SHARED, FP32, full=False),
        case("dpo-swap-shared-fp32", SHARED, FP32),
    ],
)
def test_log_ratios_are_exactly_zero(
    algorithm: str, overrides: tuple[str, ...], world_size: int, ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    arguments = (folder / "model", folder / f"{algorithm}.jsonl", tmp_path, world_size, algorithm, list(overrides))
    results = ranks.run(world_size, first_step, *arguments)
    for (logged, *_), kl_log_ratios in results:
        assert (logged["train/rewards_all_mean"], logged["train/rewards_all_std"]) == (0.0, 0.0)
        assert logged["train/logps_chosen_mean"] < -40, "the answers are long"
        assert ("perf/shared_fraction" in logged) == (SEPARATE not in overrides)
        if algorithm == "kto":
            assert logged["train/loss"] == 0.5
        if algorithm == "kto" and PAIRS not in overrides:
            examples = 6 if "_parallel_size" in str(overrides) else 6 // world_size
            assert kl_log_ratios == [0.0] * examples
            assert logged["train/kl_unclamped"] == 0.0


@pytest.mark.parametrize(
    "overrides", [(), pytest.param(CACHED, marks=pytest.mark.full), pytest.param(ADAPTER, marks=pytest.mark.full)]
)
def test_log_ratios_of_a_joint_evaluation_are_rounding_errors(
    overrides: tuple[str, ...], ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    """KTO in fp32 with shared prompts: at most a millionth of the log-probs."""
    arguments = (folder / "model", folder / "kto.jsonl", tmp_path, 1, "kto", [*overrides, SHARED, FP32])
    (((logged, *_), kl_log_ratios),) = ranks.run(1, first_step, *arguments)
    bound = 1e-6 * abs(logged["train/logps_chosen_mean"])
    assert "perf/shared_fraction" in logged
    assert len(kl_log_ratios) == 6
    assert max(map(abs, kl_log_ratios)) <= bound
    assert abs(logged["train/rewards_all_mean"]) <= 0.1 * bound
    assert logged["train/rewards_all_std"] <= 0.1 * bound
    assert abs(logged["train/loss"] - 0.5) <= 0.1 * bound


def test_the_auc_before_training_is_a_half(jobs: JobCache) -> None:
    """The reference evaluates, in fp32, a sample together with its KL example, and rounding errors are no order."""
    given = ["trainer.kto.val_before_training=true", "trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=2"]
    first = json.loads((jobs(layers=4, overrides=given) / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["val/rewards_margin"] != 0, "there are rounding errors"
    assert first["val/auc"] == 0.5
