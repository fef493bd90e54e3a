"""Preparation of a run: number of rows, packing, choices that follow from the memory of GPUs, and phases of the schedule."""

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
from nemo_kto.config.schema import ScheduleConfig
from nemo_kto.data.rows.records import DataError
from nemo_kto.device import device, kernels
from nemo_kto.memory.micro_batches import micro_batch_limits, packing_of
from nemo_kto.models.flops import ModelFlops
from nemo_kto.run import prepare, summary
from nemo_kto.run import reference_setup as reference
from nemo_kto.run.build_trainer import ScheduleLengths, schedule_lengths
from nemo_kto.run.data import check_number_of_rows, shares_of, source_settings
from nemo_kto.run.prepare import fit_to_memory
from tests.helpers.messages import Message, raises
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


COUNTS = SimpleNamespace(longest=900, tokens=4000, rows=10)
DATA: Any = SimpleNamespace(splits=SimpleNamespace(in_use={"train": SimpleNamespace(counts=COUNTS)}))
MACHINES: Any = SimpleNamespace()


@pytest.mark.parametrize(
    ("on_gpu", "mode", "memory", "tokens", "reference_on_gpu", "lines"),
    [
        (True, "swap", "gpu", 4096, True, ["4,096 tokens (enough), not packed (fp32)", "GPU memory (room)"]),
        (True, "swap", "cpu", 4096, False, ["4,096 tokens (enough), not packed (fp32)", "host memory (room)"]),
        (True, "cached", "", 4096, False, ["4,096 tokens (enough), not packed (fp32)"]),
        (False, "swap", "cpu", 512, False, []),
    ],
)
def test_sizes_and_memory_are_chosen_once(
    on_gpu: bool,
    mode: str,
    memory: str,
    tokens: int,
    reference_on_gpu: bool,
    lines: list[str],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def size(run: ResolvedRun, _: object) -> tuple[int, str]:
        assert run.row_tokens == 400
        return 4096, "enough"

    def place(run: ResolvedRun, _: object, *, longest: int) -> tuple[str, str]:
        assert (run.micro_batch_tokens, longest) == (4096 if on_gpu else None, 900)
        return memory, "room"

    def check(run: ResolvedRun, _: object, *, longest: int) -> str:
        return f"{run.micro_batch_tokens} {run.reference_memory} {longest}"

    monkeypatch.setattr(device, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(prepare, "size_micro_batches", size)
    monkeypatch.setattr(prepare, "place_reference", place)
    monkeypatch.setattr(prepare, "check_memory", check)
    given = [f"pretrained_checkpoint.restore_from_path={tiny_llama}", "model.data.seq_length=1024"]
    run = resolved(*given, "trainer.precision=32", f"model.reference.mode={mode}")
    placement = fit_to_memory(run, DATA, MACHINES)
    assert (placement.limits.tokens, placement.reference_on_gpu) == (tokens, reference_on_gpu)
    assert caplog.messages == [f"{4096 if on_gpu else None} {memory} 900"], "of the longest row, with both choices"
    shown = summary._micro_batches(run, placement) | summary._reference_memory(placement)
    assert [*shown.values()] == lines
    assert (run.micro_batch_tokens, run.reference_memory) == (None, ""), "the run stays as it was"


NONE: dict[str, Any] = {
    "name": "CosineAnnealing", "warmup_steps": 0, "warmup_ratio": None, "constant_steps": 0, "min_lr": 0.0,
    "wsd_decay_steps": None, "wsd_decay_style": None, "num_cycles": None,
}  # fmt: skip
WSD: dict[str, Any] = {"name": "WSD", "wsd_decay_style": "linear"}


def lengths(steps: int, **given: Any) -> tuple[ScheduleLengths, list[str]]:
    return schedule_lengths(ScheduleConfig(**NONE | given), steps)


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"), [(0.1, 100, 10), (0.29, 100, 29), (0.1, 19, 1), (0.1, 9, 0), (0.99, 3, 2)]
)
def test_a_ratio_refers_to_the_run(ratio: float, steps: int, warmup: int) -> None:
    assert lengths(steps, warmup_ratio=ratio) == (ScheduleLengths(warmup, 0, None), [])


def test_lengths_that_fit_and_a_shorter_default_need_no_warning() -> None:
    assert lengths(100, warmup_steps=None) == (ScheduleLengths(10, 0, None), [])
    assert lengths(4, warmup_steps=None) == (ScheduleLengths(3, 0, None), [])
    assert lengths(10, **WSD, warmup_steps=2, constant_steps=3, wsd_decay_steps=5) == (ScheduleLengths(2, 3, 5), [])
    assert lengths(40, warmup_steps=None, warmup_ratio=0.1) == (ScheduleLengths(4, 0, None), [])


def test_too_long_phases_are_shortened_with_a_warning() -> None:
    found, warnings = lengths(4, **WSD, warmup_steps=9, constant_steps=2, wsd_decay_steps=3)
    assert found == ScheduleLengths(3, 0, 1)
    assert warnings == [
        Message("model.optim.sched.warmup_steps", "4", "9", "3"),
        Message("model.optim.sched.constant_steps", "1", "2", "0"),
        Message("model.optim.sched.wsd_decay_steps", "1", "min_lr", "3", "1"),
    ]
