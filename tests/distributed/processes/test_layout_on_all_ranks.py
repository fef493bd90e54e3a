"""Ranks with different layouts, as recipe=auto may choose them for GPUs of different sizes, are refused."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.hf_jobs import message_of
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool


def start_with_own_layout(model: Path, rows: Path, folder: Path) -> str:
    """Error of this rank in a job, in which rank 1 has another layout."""
    from nemo_kto.distributed import state
    from tests.helpers.training_jobs import train

    own = [["model.pipeline_model_parallel_size=1"], ["model.pipeline_model_parallel_size=2", "model.micro_batch_tokens=64"]]
    return message_of(lambda: train(model, rows, folder, 2, ["model.micro_batch_size=null", *own[state.rank()]]))


def test_a_layout_that_differs_between_ranks(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    pipeline, tokens = "model.pipeline_model_parallel_size", "model.micro_batch_tokens"
    found = ranks.run(2, start_with_own_layout, tiny_llama, kto_rows, tmp_path)
    assert found == 2 * [
        Message(
            "UserError",
            f"{pipeline}, {tokens} must be the same on all ranks",
            f"{pipeline}=1 {tokens}=null on rank 0 and {pipeline}=2 {tokens}=64 on rank 1",
            "set these keys on the command line",
        )
    ]
    assert not any(tmp_path.iterdir())
