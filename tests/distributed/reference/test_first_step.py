"""At the first step policy and reference are equal: every log-ratio is exactly zero in every reference mode and in bf16."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint, write_rows
from tests.helpers.training_jobs import train, trajectory

LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4")
ADAPTER = (*LORA, "model.reference.mode=adapter")
TP2, SEQUENCE = "model.tensor_model_parallel_size=2", "model.sequence_parallel"
CACHED = ("model.reference.mode=cached",)


def first_step(model: Path, rows: Path, folder: Path, world_size: int, algorithm: str, overrides: list[str]) -> Any:
    """On a rank: one step in bf16; its metrics, and the log-ratios of the KL examples of this rank."""
    from nemo_kto.models.nlp.gpt import megatron_gpt_kto_model as kto

    seen: list[float] = []
    original = kto.kl_sums

    def recorded(log_ratios_B: Any, valid_B: Any) -> Any:
        seen.extend(log_ratios_B.tolist())
        return original(log_ratios_B, valid_B)

    settings = [
        "trainer.precision=bf16",
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
    return trajectory(folder)[0], seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of hidden size 512, and answers of 40 to 100 tokens."""
    root = tmp_path_factory.mktemp("wide")
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    make_checkpoint(root / "model", "llama", dtype="bfloat16", initializer_range=0.04, **size)
    draw = random.Random(5)

    def answer() -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.randint(40, 100)))

    write_rows(
        root / "kto.jsonl",
        [{"prompt": f"{n}:", "response": answer(), "preference": "chosen" if n % 2 else "rejected"} for n in range(12)],
    )
    write_rows(root / "dpo.jsonl", [{"prompt": f"{n}:", "chosen": answer(), "rejected": answer()} for n in range(12)])
    return root


@pytest.mark.parametrize(
    ("algorithm", "overrides", "world_size"),
    [
        pytest.param("kto", (), 1, id="kto-swap"),
        pytest.param("kto", CACHED, 1, id="kto-cached"),
        pytest.param("kto", ADAPTER, 1, id="kto-adapter", marks=pytest.mark.full),
        pytest.param("dpo", (), 1, id="dpo-swap", marks=pytest.mark.full),
        pytest.param("dpo", CACHED, 2, id="dpo-cached-two-ranks", marks=pytest.mark.full),
        pytest.param("dpo", ADAPTER, 1, id="dpo-adapter", marks=pytest.mark.full),
        pytest.param("kto", CACHED, 2, id="kto-cached-two-ranks", marks=pytest.mark.full),
        pytest.param("kto", (*CACHED, TP2), 2, id="kto-cached-tp2", marks=pytest.mark.full),
        pytest.param("kto", (*ADAPTER, TP2, f"{SEQUENCE}=true"), 2, id="kto-adapter-sequence", marks=pytest.mark.full),
        pytest.param("kto", ("model.pipeline_model_parallel_size=2",), 2, id="kto-swap-pp2", marks=pytest.mark.full),
    ],
)
def test_log_ratios_are_exactly_zero(
    algorithm: str, overrides: tuple[str, ...], world_size: int, ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    arguments = (folder / "model", folder / f"{algorithm}.jsonl", tmp_path, world_size, algorithm, list(overrides))
    results = ranks.run(world_size, first_step, *arguments)
    for logged, kl_log_ratios in results:
        assert (logged["train/rewards_all_mean"], logged["train/rewards_all_std"]) == (0.0, 0.0)
        assert logged["train/logps_chosen_mean"] < -40, "the answers are long"
        if algorithm == "kto":
            examples = 6 if "_parallel_size" in str(overrides) else 6 // world_size
            assert kl_log_ratios == [0.0] * examples


def test_the_auc_before_training_is_a_half(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    """In fp32 the reference evaluates a sample together with its KL example, and rounding errors are no order."""
    given = ["trainer.kto.val_before_training=true", "trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=1.0"]
    ranks.run(1, train, tiny_llama, kto_rows, tmp_path, 1, [*given, "model.reference.mode=swap"])
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["val/rewards_margin"] != 0, "there are rounding errors"
    assert first["val/auc"] == 0.5
