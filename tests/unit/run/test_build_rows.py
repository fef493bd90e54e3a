"""Too few rows are reported before the model is built."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.config import compose
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.data.rows.records import DataError
from nemo_kto.models.flops import ModelFlops
from nemo_kto.run import build, policy, reference
from nemo_kto.run.data import too_few_rows
from nemo_kto.run.rows import micro_batch_limits, shares_of, source_settings
from tests.helpers.messages import Message
from tests.helpers.tiny_models import make_tokenizer


def resolved(*overrides: str, name: str = "kto") -> ResolvedRun:
    given = ["pretrained_checkpoint.restore_from_path=model", "model.data.data_prefix=rows.jsonl", *overrides]
    cfg, mistakes = compose.to_config(compose.load(given, source=compose.Source(config_name=f"gpt_{name}")))
    assert cfg is not None, mistakes
    return ResolvedRun.of(cfg)


@pytest.mark.parametrize(
    ("rows", "micro", "data_parallel", "kto", "dpo"),
    [
        (64, 1, 1, None, None),
        (63, 1, 1, ["model.global_batch_size=63"], ["model.global_batch_size=63"]),
        (40, 4, 4, ["model.global_batch_size=32"], ["model.global_batch_size=32"]),
        (3, 2, 1, ["model.global_batch_size=2"], ["model.global_batch_size=2"]),
        (3, 4, 1, [], []),
        (1, 1, 1, [], ["model.global_batch_size=1"]),  # KTO pairs each prompt with another answer
    ],
)
def test_the_largest_batch_that_fits_is_named(
    rows: int, micro: int, data_parallel: int, kto: list[str] | None, dpo: list[str] | None
) -> None:
    for name, remedy in (("kto", kto), ("dpo", dpo)):
        cfg = resolved(f"model.micro_batch_size={micro}", name=name).cfg
        error = too_few_rows(cfg, rows, data_parallel=data_parallel)
        if remedy is None:
            assert error is None
        else:
            assert error == Message("model.global_batch_size", f"{rows}", "64", *remedy, "model.data.data_prefix")


@pytest.mark.parametrize(
    ("keys", "prompts", "tokens"),
    [
        ([], None, 512),
        (["model.micro_batch_tokens=4096"], None, 4096),
        (["model.micro_batch_size=2"], 2, None),
        (["model.micro_batch_size=2", "model.micro_batch_tokens=256"], 2, 256),
    ],
)
def test_the_default_limit_of_tokens(keys: list[str], prompts: int | None, tokens: int | None) -> None:
    limits = micro_batch_limits(resolved(*keys))
    assert (limits.prompts, limits.tokens) == (prompts, tokens)


@pytest.mark.parametrize(
    ("keys", "on_gpu", "shares"),
    [
        ([], False, True),
        ([], True, False),
        (["model.context_parallel_size=2"], False, False),
        (["model.data.reset_attention_mask=true"], False, False),
        (["model.data.share_prompts=false"], False, False),
        (["model.data.share_prompts=true"], True, True),
    ],
)
def test_prompts_are_shared_where_attention_supports_it(keys: list[str], on_gpu: bool, shares: bool) -> None:
    assert micro_batch_limits(resolved(*keys), on_gpu=on_gpu).share_prompts is shares


@pytest.mark.parametrize("shares", [False, True])
def test_layers_are_built_for_prompts_that_are_shared(
    shares: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[bool]()

    def build_chunks(architecture: Architecture, *, share_prompts: bool, **settings: Any) -> NoReturn:
        given.append(share_prompts)
        raise InterruptedError

    monkeypatch.setattr(policy, "build_chunks", build_chunks)
    keys = f"pretrained_checkpoint.restore_from_path={tiny_llama}", f"model.data.share_prompts={str(shares).lower()}"
    with pytest.raises(InterruptedError):
        policy.build_policy(resolved("trainer.precision=32", *keys))
    assert given == [shares]


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


def test_rows_are_read_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path) -> None:
    def wrong_rows(*_: object, **__: object) -> NoReturn:
        raise DataError("1 broken row")

    def too_early(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the model was built before the rows were read")

    monkeypatch.setattr(build, "build_data", wrong_rows)
    monkeypatch.setattr(build, "build_policy", too_early)
    monkeypatch.setattr(build.state, "init_distributed", lambda **_: None)
    monkeypatch.setattr(build.state, "raise_together", lambda *_: None)
    monkeypatch.setattr(build, "hold_run_folder", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(build, "resolve_precision", lambda run: run)
    monkeypatch.setattr(build, "model_tokenizer", lambda files: make_tokenizer())
    with pytest.raises(DataError, match="1 broken row"):
        build.train(resolved())


def test_reference_log_probs_in_fp8_have_a_separate_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ReferenceCache", lambda **kept: kept["settings"])
    policy: Any = SimpleNamespace(base_model=Path("model"))
    engine: Any = SimpleNamespace(average_log_probs=False)

    def settings(*overrides: str) -> Any:
        return reference._open_cache(resolved(*overrides), policy, engine)

    assert settings("model.fp8=e4m3") == settings() | {"fp8": "e4m3"}
