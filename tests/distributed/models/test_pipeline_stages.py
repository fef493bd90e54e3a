"""Virtual and uneven pipeline stages: their passes, their weights, and their steps.

The common layouts are in the tests of layouts, gradients, adapters and checkpoints; here are those that need a model
of another number of layers than these have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.distributed.state import Layout
from tests.distributed.training.test_layouts import RUNS
from tests.helpers import lora_jobs
from tests.helpers.engines import engine, split_of
from tests.helpers.hf_models import weights
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import assert_same, length, train, trajectory

STEPS = 10
EVERY_END = {"counts_embedding": True, "counts_loss": True}
# Ranks, layers, layout, and the ends of the pipeline. Of six layers in eight chunks, the first and the last have none.
SPLITS: dict[str, tuple[int, int, Layout, dict[str, Any]]] = {
    "pp2_vp3": (2, 6, Layout(pipeline=2, virtual=3), {}),
    "pp2_uneven": (2, 5, Layout(pipeline=2), {"first": 3}),
    "pp4_vp2_counted": (4, 6, Layout(pipeline=4, virtual=2), EVERY_END),
    "pp4_vp2_uneven": (4, 14, Layout(pipeline=4, virtual=2), {"first": 2, "last": 4}),
}


def passes(model: Path, layout: Layout, rows: int) -> tuple[int, int, list[tuple[bool, int]], list[int]]:
    """On a rank: its stage, the number of micro-batches, its passes in their order, and the sizes of the micro-batches."""
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss
    from nemo_kto.models.engine.sequences import SequenceBatch

    state.init_distributed(layout=layout, seed=1)
    chunks, architecture = lora_jobs.build(model, layout, None)
    seen: list[tuple[bool, int]] = []
    sizes: list[int] = []

    def watch(number: int) -> Callable[..., None]:
        def note(_: Any, __: Any, output: torch.Tensor) -> None:
            seen.append((True, number))
            output.register_hook(lambda _: seen.append((False, number)))

        return note

    for number, chunk in enumerate(chunks):
        chunk.register_forward_hook(watch(number))

    def loss(sequence_index_b: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
        sizes.append(len(sequence_index_b))
        return MicroBatchLoss.of({"loss_sum": logprobs.response_b.sum(), "rows": torch.tensor(len(logprobs.response_b))})

    tokens = torch.arange(12 * rows).view(rows, 12)
    batch = SequenceBatch.of(tokens, tokens, torch.arange(13 - rows, 13))  # no two are of the same length
    engine(chunks, architecture, micro_batch_size=1).forward_backward(batch, loss, forward_only=False)
    return state.pipeline_stage(), sum(is_forward for is_forward, _ in seen) // len(chunks), seen, sizes


@pytest.mark.parametrize(
    ("layout", "rows", "empty"),
    [
        (Layout(pipeline=2, virtual=2), 5, 1),
        (Layout(pipeline=2, virtual=4), 1, 1),
        (Layout(pipeline=2), 5, 0),
        pytest.param(Layout(pipeline=4, virtual=2), 9, 3, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_passes_run_in_the_order_that_plans_assume(
    layout: Layout, rows: int, empty: int, ranks: RankPool, tmp_path: Path
) -> None:
    """The order of passes in stages.py equals that of megatron-core; the last micro-batches are empty."""
    model = make_checkpoint(tmp_path, "llama", num_hidden_layers=8)
    for stage, micro_batches, seen, sizes in ranks.run(layout.pipeline, passes, model, layout, rows):
        assert micro_batches == rows + empty
        assert seen == list(split_of(layout).passes(stage, micro_batches))
        assert sizes == ([1] * rows + [0] * empty if stage == layout.pipeline - 1 else [])


def round_trip(model: Path, adapter: Path, layout: Layout, split: PipelineSplit, out: Path) -> None:
    """On a rank: import and export, of the weights and of adapters on them."""
    from nemo_kto.distributed import state
    from nemo_kto.huggingface.hf_weights import export
    from nemo_kto.huggingface.peft import export_adapter, load_adapter, read_adapter_settings

    state.init_distributed(layout=layout, seed=1)
    chunks, architecture = lora_jobs.build(model, layout, read_adapter_settings(adapter), split=split)
    load_adapter(chunks, architecture, adapter)
    export_adapter(chunks, architecture, out=out / "adapter", base_model=model)
    export(chunks, architecture, source=model, out=out / "model", max_shard_bytes=100_000)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", ["pp2_vp3", "pp2_uneven", *(pytest.param(name, marks=pytest.mark.full) for name in list(SPLITS)[2:])]
)
def test_weights_are_imported_and_exported_bitwise(name: str, family: str, ranks: RankPool, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    world_size, layers, layout, ends = SPLITS[name]
    model = make_checkpoint(tmp_path / "model", family, num_hidden_layers=layers)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(str(tmp_path / "adapter"))
    ranks.run(world_size, round_trip, model, tmp_path / "adapter", layout, split_of(layout, **ends), tmp_path / "out")
    for part in ("model", "adapter"):
        before, after = weights(tmp_path / part), weights(tmp_path / "out" / part)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[tensor], before[tensor]) for tensor in before)


CASES = {
    "kto": SPLITS,
    "dpo": ("pp2_uneven", "pp4_vp2_counted"),
    "lora": ("pp2_vp3", "pp4_vp2_uneven"),
    "lora_dpo": ("pp2_uneven", "pp4_vp2_counted"),
}


@pytest.mark.full  # the quick matrix compares gradients at uneven stages, and steps at even ones
@pytest.mark.parametrize(("run", "name"), [(run, name) for run, names in CASES.items() for name in names])
def test_the_same_steps_as_on_one_rank(
    run: str, name: str, ranks: RankPool, kto_rows: Path, dpo_rows: Path, tmp_path: Path
) -> None:
    """The model has tied embeddings, and the micro-batches differ in number and width."""
    world_size, layers, layout, ends = SPLITS[name]
    algorithm, of_run, _ = RUNS[run]
    model = make_checkpoint(tmp_path / "model", "qwen2", num_hidden_layers=layers)
    rows = kto_rows if algorithm == "kto" else dpo_rows
    common = [*of_run, *length(algorithm, STEPS), "model.micro_batch_size=null", "model.micro_batch_tokens=90"]
    keys = {
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "num_layers_in_first_pipeline_stage": ends.get("first"),
        "num_layers_in_last_pipeline_stage": ends.get("last"),
        "account_for_embedding_in_pipeline_split": ends.get("counts_embedding"),
        "account_for_loss_in_pipeline_split": ends.get("counts_loss"),
    }
    given = [f"model.{key}={value}" for key, value in keys.items() if value is not None]
    ranks.run(1, train, model, rows, tmp_path / "one", 1, common, algorithm)
    ranks.run(world_size, train, model, rows, tmp_path / "staged", world_size, [*common, *given], algorithm)
    assert_same(trajectory(tmp_path / "staged"), trajectory(tmp_path / "one"), steps=STEPS)
