"""The default number of tokens of a micro-batch on GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.layers.attention import RepeatedHeads
from nemo_kto.memory import micro_batches
from nemo_kto.memory.hardware import GPUS, Machines, gpus_elsewhere, these_machines
from nemo_kto.memory.micro_batches import repeats_keys
from nemo_kto.memory.run_plan import bubble_of_shorter_rows, make_plan, size_micro_batches
from nemo_kto.models import gpt
from nemo_kto.tools.plan.speed import speed_of
from tests.unit.conftest import Load
from tests.unit.tools.plan.test_plan import LLAMA, MIXTRAL

# The shapes of SmolLM2-135M and Llama 3.2 1B.
_TIED = {"tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "135M": LLAMA
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152, **_TIED}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
    "1B": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, **_TIED},
    "8B": LLAMA,
    "8x7B": MIXTRAL,
}
LORA, TENSOR = "model.peft.peft_scheme=lora", ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]
PIPELINE, CONTEXT = "model.pipeline_model_parallel_size=2", "model.context_parallel_size=2"
SELECTIVE = "model.activations_checkpoint_granularity=selective"
EXPERTS = ["model.expert_model_parallel_size=8", "model.expert_tensor_parallel_size=1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with a configuration file for each shape."""
    for name, shape in SHAPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    monkeypatch.chdir(tmp_path)


def resolved(load: Load, model: str, *keys: str) -> ResolvedRun:
    return ResolvedRun.of(load(f"pretrained_checkpoint.restore_from_path={model}", "trainer.precision=bf16", *keys))


@pytest.mark.parametrize(
    ("model", "keys", "machines", "tokens", "reason"),
    [
        # 2 x 200 us x 445 TFLOP/s / 7.08 MFLOP a token of a layer = 25,152
        ("135M", [], (1, "h200"), 32768, "kernel launches"),
        # 8 bytes a weight / 4.08 TB/s / 0.01 x 445 TFLOP/s / 6 FLOP a weight = 14,544
        ("1B", [], (1, "h200"), 16384, "weight gradients"),
        ("1B", [LORA], (1, "h200"), 8192, "matrix products"),
        # a rank has one expert of eight, and its tokens choose two: 7 billion weights for the FLOPs of 12.9 billion
        ("8x7B", [*EXPERTS, SELECTIVE, "model.global_batch_size=1024"], (64, "h200"), 8192, "matrix products"),
        ("1B", ["model.global_batch_size=2"], (1, "h200"), 4096, "share"),
        # four micro-batches for each of two stages: of 64 rows with a mean of 2,048 / 4 tokens, or fewer
        ("8B", ["model.global_batch_size=256", PIPELINE], (8, "h200"), 4096, "25%"),
        ("8B", [], (8, "h200"), 8192, "144.4 GB of 141.0 GB"),
        ("8B", [], (8, "h100"), 2048, "83.5 GB of 80.0 GB"),
        ("8B", [*TENSOR, CONTEXT], (8, "h200"), 32768, "weight gradients"),  # 16,384 on each of two ranks
    ],
)
def test_the_number_follows_from_model_and_memory(
    model: str, keys: list[str], machines: tuple[int, str], tokens: int, reason: str, load: Load
) -> None:
    run, gpus = resolved(load, model, *keys), gpus_elsewhere(*machines)
    found, why = size_micro_batches(run, gpus)
    assert (found, reason in why) == (tokens, True), why
    for planned in (make_plan(run, gpus), make_plan(run.with_micro_batch_tokens(found, why), gpus)):
        assert planned.training.micro_batch_tokens == tokens
        assert planned.run.micro_batch_reason == why
        assert planned.training.packed


@pytest.mark.parametrize(
    ("engine", "grouped", "repeats"), [(False, True, False), (False, False, True), (True, False, False)]
)
def test_the_plan_counts_keys_that_are_repeated(
    engine: bool, grouped: bool, repeats: bool, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of the 1B shape saves queries and outputs of 2,048 values in both cases. With eight groups of 64 values it
    saves keys of 512, and for the values the fused tensor of 3,072; without groups twice 2,048."""
    monkeypatch.setattr(micro_batches.device, "on_gpu", lambda: True)
    monkeypatch.setattr(gpt, "uses_transformer_engine", lambda dtype: engine)
    kernel: Any = print
    monkeypatch.setattr(gpt, "packed_attention", lambda dtype: kernel if grouped else RepeatedHeads(kernel))
    run = resolved(load, "1B")
    assert repeats_keys(run) is repeats
    machines = replace(gpus_elsewhere(1, "h200"), repeats_keys=repeats_keys(run))
    more = make_plan(run, machines).training.saved.layer() - make_plan(run, gpus_elsewhere(1, "h200")).training.saved.layer()
    assert more == 2 * (2 * 2048 - 512 - 3072) * repeats
    monkeypatch.setattr(micro_batches.device, "on_gpu", lambda: False)
    assert repeats_keys(run) is False


@pytest.mark.parametrize(
    ("keys", "machines", "chunk", "summands"),
    [
        ([], (1, "h200"), 1024, 1),
        (["model.logprob_chunk_size=4096", "model.logprob_gradient_summands=2"], (1, "h200"), 4096, 2),
        ([], None, 1024, 1),
    ],
)
def test_the_plan_counts_the_chunk_of_logits_of_its_machines(
    keys: list[str], machines: tuple[int, str] | None, chunk: int, summands: int, load: Load
) -> None:
    """Of a model of 1.24 billion parameters: 4,096 tokens with 128,256 logits each take 2.1 GB in fp32, 1.05 GB in bf16."""
    run = resolved(load, "1B", *keys)
    gpus = these_machines(run, timed=False) if machines is None else gpus_elsewhere(*machines)
    plan = make_plan(run, gpus)
    assert (plan.training.logprob_chunk, plan.training.logprob_summands) == (chunk, summands)
    if machines is not None:
        hidden = plan.training.saved.head() * plan.training.rank_tokens
        assert plan.largest.logprobs - hidden == chunk * 128_256 * (4 + 2 * summands)


@pytest.mark.parametrize(
    ("row_tokens", "tokens", "count"),
    [
        (None, 8192, 32),  # 64 rows / 8,192 tokens if all have 4,096; with a mean of 1,024 four for each stage
        (1024, 8192, 8),
        # 64 rows of 500 tokens are 32,000: four for each stage are 4,000 tokens, rounded down
        (500, 2048, 16),
        (2048, 16384, 8),
        (100, 2048, 4),  # at least 2,048 tokens: 20 rows
    ],
)
def test_a_pipeline_has_enough_micro_batches_for_the_counted_rows(
    row_tokens: int | None, tokens: int, count: int, load: Load
) -> None:
    of_pipeline = [PIPELINE, "model.tensor_model_parallel_size=4", "model.sequence_parallel=true"]
    keys = ["model.data.seq_length=4096", "model.global_batch_size=64", "model.optim.moments_dtype=bf16"]
    run, gpus = resolved(load, "8B", *of_pipeline, *keys), gpus_elsewhere(8, "h200")
    if row_tokens is not None:
        run = run.with_row_tokens(row_tokens)
    assert size_micro_batches(run, gpus)[0] == tokens
    plan = make_plan(run, gpus)
    assert (plan.limits.tokens, plan.step.micro_batches) == (tokens, count)
    assert plan.training.micro_batches == 64 * 4096 // max(tokens, 4096), "memory is that of the longest rows"
    assert speed_of(plan).bubble == 1 / (count + 1)
    if row_tokens is None:
        assert bubble_of_shorter_rows(plan) == 1 / (8 + 1)


def test_counted_rows_change_nothing_without_a_pipeline(load: Load) -> None:
    run, gpus = resolved(load, "1B"), gpus_elsewhere(1, "h200")
    assert size_micro_batches(run.with_row_tokens(100), gpus) == size_micro_batches(run, gpus)


@pytest.mark.parametrize("key", ["model.micro_batch_tokens=3000", "model.micro_batch_size=3"])
def test_a_limit_of_the_user_is_kept(key: str, load: Load) -> None:
    run, machines = resolved(load, "1B", key), gpus_elsewhere(1, "h200")
    assert size_micro_batches(run, machines) == (None, "")
    limit = 6144 if "size" in key else 3000  # a pack has up to 3,000 tokens
    assert make_plan(run, machines).training.micro_batch_tokens == limit


def test_a_reference_in_gpu_memory_has_priority(load: Load) -> None:
    """47.8 GB with 16,384 tokens; the copy of 1.24 billion weights takes 2.5 GB, and 49.5 of 55 GB may be used."""
    machines = gpus_elsewhere(1, "h200").with_memory(55e9)
    assert size_micro_batches(resolved(load, "1B"), machines)[0] == 16384
    run = resolved(load, "1B", "model.reference.mode=swap")
    found, why = size_micro_batches(run, machines)
    assert (found, "reference" in why) == (8192, True)
    assert make_plan(run, machines).training.reference_on_gpu
    on_host = resolved(load, "1B", "model.reference.mode=swap", "model.reference.device=cpu")
    assert size_micro_batches(on_host, machines)[0] == 16384


def test_a_machine_chooses_what_a_plan_of_its_kind_says(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers report more memory than the data sheet: with 86 GB, 16,384 tokens would need 76.7 of 77.4 GB."""
    run = resolved(load, "8B", *TENSOR, "model.global_batch_size=64", "model.optim.moments_dtype=bf16")
    listed = gpus_elsewhere(8, "h100")
    monkeypatch.setitem(GPUS, "h100", listed.hardware)
    reported = Machines(ranks=8, on_gpu=True, hardware=replace(listed.hardware, name="NVIDIA H100 80GB HBM3", memory=86.0e9))
    unknown = Machines(ranks=8, on_gpu=True, hardware=replace(reported.hardware, name="NVIDIA X"))
    chosen = [size_micro_batches(run, machines)[0] for machines in (listed, reported, unknown)]
    assert chosen == [8192, 8192, 16384]
