"""Too few rows are reported before the model is built."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.config import compose
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.data.rows.records import DataError
from nemo_kto.device import device, kernels
from nemo_kto.memory.micro_batches import micro_batch_limits, packing_of
from nemo_kto.models.flops import ModelFlops
from nemo_kto.run import reference_setup as reference
from nemo_kto.run.data import check_number_of_rows, shares_of, source_settings
from tests.helpers.messages import raises
from tests.helpers.tiny_models import make_checkpoint, make_tokenizer


def resolved(*overrides: str, name: str = "kto") -> ResolvedRun:
    given = ["pretrained_checkpoint.restore_from_path=model", "model.data.data_prefix=rows.jsonl", *overrides]
    cfg, mistakes = compose.to_config(compose.load(given, source=compose.our_source(RECIPES[name])))
    assert cfg is not None, mistakes
    return ResolvedRun.of(cfg)


@pytest.mark.parametrize(
    ("rows", "micro", "data_parallel", "kto", "dpo"),
    [
        (64, 1, 1, None, None),
        (40, 4, 4, ["model.global_batch_size=32"], ["model.global_batch_size=32"]),
        (3, 4, 1, [], []),
        (1, 1, 1, [], ["model.global_batch_size=1"]),  # KTO pairs each prompt with another answer
    ],
)
def test_the_largest_batch_that_fits_is_named(
    rows: int, micro: int, data_parallel: int, kto: list[str] | None, dpo: list[str] | None
) -> None:
    for name, remedy in (("kto", kto), ("dpo", dpo)):
        cfg = resolved(f"model.micro_batch_size={micro}", name=name).cfg
        names = ("model.global_batch_size", f"{rows}", "64", *(remedy or ()), "model.data.data_prefix")
        with nullcontext() if remedy is None else raises(DataError, *names):
            check_number_of_rows(cfg, rows, data_parallel=data_parallel)


@pytest.mark.parametrize(
    ("keys", "on_gpu", "shares"),
    [
        ([], False, True),
        (["model.micro_batch_size=2"], True, False),
        (["model.context_parallel_size=2"], False, False),
        (["model.data.share_prompts=false"], False, False),
        (["model.data.share_prompts=true", "model.micro_batch_size=2"], True, True),
    ],
)
def test_prompts_are_shared_where_attention_supports_it(
    keys: list[str], on_gpu: bool, shares: bool, tiny_llama: Path
) -> None:
    run = resolved(*keys, f"pretrained_checkpoint.restore_from_path={tiny_llama}")
    assert micro_batch_limits(run, on_gpu=on_gpu).share_prompts is shares


@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ([], (None, 512)),
        (["model.micro_batch_size=2"], (2, None)),
        (["model.micro_batch_size=2", "model.micro_batch_tokens=256"], (2, 256)),
    ],
)
def test_the_default_limit_of_tokens(keys: list[str], limits: tuple[int | None, int | None], tiny_llama: Path) -> None:
    found = micro_batch_limits(resolved(*keys, f"pretrained_checkpoint.restore_from_path={tiny_llama}"))
    assert (found.prompts, found.tokens) == limits


CONTEXT = "model.context_parallel_size=2"


@pytest.mark.parametrize(
    ("family", "changes", "keys", "on_gpu", "is_on", "reason"),
    [
        ("llama", {}, [], True, True, "GPU"),
        ("llama", {}, [], False, False, "GPU"),
        ("llama", {}, ["model.data.packing=true"], False, True, "user"),
        ("llama", {}, ["model.micro_batch_size=2"], True, False, "model.micro_batch_size"),
        ("llama", {}, ["trainer.precision=32"], True, False, "fp32"),
        ("gemma2", {}, [], True, False, "soft cap"),
        ("llama", {}, [CONTEXT], True, True, "GPU"),
        ("mistral", {"sliding_window": 16}, [CONTEXT], True, False, "context"),
        ("llama", {"head_dim": 100}, [], True, True, "GPU"),  # padded to 104
        ("llama", {"head_dim": 264}, [], True, False, "heads of 264 values"),
    ],
)
def test_rows_are_packed_on_gpus_where_one_kernel_attends_to_all(
    family: str, changes: dict[str, Any], keys: list[str], on_gpu: bool, is_on: bool, reason: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / family, family, **changes)
    run = resolved("trainer.precision=bf16", *keys, f"pretrained_checkpoint.restore_from_path={model}")
    found = packing_of(run, on_gpu=on_gpu)
    assert found.is_on is is_on
    assert reason in found.reason
    assert micro_batch_limits(run, on_gpu=on_gpu).packed is is_on


@pytest.mark.parametrize(
    ("engine", "kernel", "has_bf16", "keys", "is_on"),
    [
        (True, False, True, [], True),
        (False, False, True, [], False),
        (False, True, True, [], True),
        (False, True, False, [], False),
        (True, False, True, [CONTEXT], True),
        (False, True, True, [CONTEXT], False),
    ],
)
def test_a_rank_packs_only_with_a_kernel(
    engine: bool,
    kernel: bool,
    has_bf16: bool,
    keys: list[str],
    is_on: bool,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = resolved("trainer.precision=bf16", f"pretrained_checkpoint.restore_from_path={tiny_llama}", *keys)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "gpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(kernels, "uses_transformer_engine", lambda dtype: engine)
    monkeypatch.setattr(kernels, "varlen_attention", lambda dtype: print if kernel else None)
    assert packing_of(run).is_on is is_on
    assert ("bf16" in packing_of(run).reason) is not has_bf16


def test_kto_needs_two_validation_rows_and_its_variant_without_z0_one() -> None:
    def least(run: ResolvedRun) -> int:
        return int(source_settings(run, make_tokenizer())["min_validation_rows"])

    assert [least(resolved(name=name)) for name in RECIPES] == [2, 1]
    for loss in ("apo_zero_unpaired", "bco"):
        assert least(resolved(f"model.kto.preference_loss={loss}")) == 1


@pytest.mark.parametrize(
    ("loss", "training", "validation"),
    [("kto", (4, 2), (2, 2)), ("apo_zero_unpaired", (4, 0), (2, 0)), ("bco", (5, 0), (2, 0))],
)
def test_costs_of_packed_shards_include_the_passes_of_the_loss(
    loss: str, training: tuple[int, int], validation: tuple[int, int], tiny_llama: Path
) -> None:
    """Reference, forward, two for the backward pass, and one more for delta; over samples, and over KL examples."""
    given = [f"pretrained_checkpoint.restore_from_path={tiny_llama}", "model.data.packing=true", "model.reference.mode=swap"]
    run = resolved(*given, f"model.kto.preference_loss={loss}")
    forward = ModelFlops.of_model(read_architecture(tiny_llama, tensor_parallel=1)).forward
    for is_training, passes in ((True, training), (False, validation)):
        costs = cast(Any, shares_of(run, training=is_training)).keywords["costs"]
        for cost, count in zip((costs.cost, costs.kl_cost), passes, strict=True):
            assert (cost and cost(20)) == (count * forward.of_tokens(20) or None)


def test_reference_log_probs_in_fp8_have_a_separate_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ReferenceCache", lambda **kept: kept["settings"])
    policy: Any = SimpleNamespace(base_model=Path("model"))
    engine: Any = SimpleNamespace(average_log_probs=False)

    def settings(*overrides: str) -> Any:
        return reference._open_cache(resolved(*overrides), policy, engine)

    assert settings("model.fp8=e4m3") == settings() | {"fp8": "e4m3"}
