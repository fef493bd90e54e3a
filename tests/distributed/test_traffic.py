"""What ranks send in a step, counted, and compared with the closed forms of plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_kto.parallel.state import Layout
from tests.distributed import lora_jobs
from tests.distributed.engines import engine, split_of
from tests.distributed.ranks import RankPool
from tests.distributed.traffic import Traffic
from tests.tiny import make_checkpoint

ROWS, WIDTH, LAYERS = 8, 96, 8


def count(model: Path, layout: Layout, distributed: bool) -> tuple[dict[str, tuple[float, float, int]], int]:
    """On a rank: for each axis bytes that it sent in a step with one forward pass besides, planned bytes, and the number of
    messages; its stage."""
    from megatron.core import parallel_state

    from nemo_kto.models.engine import MicroBatchLoss
    from nemo_kto.models.memory import Training
    from nemo_kto.models.sequences import SequenceBatch
    from nemo_kto.models.speed import Step, stage_traffic
    from nemo_kto.parallel import state

    state.init_distributed(layout=layout, seed=1)
    chunks, architecture = lora_jobs.build(model, layout, None, distributed=distributed)
    optimizer = lora_jobs.optimizer_of(chunks, distributed=distributed)
    data = parallel_state.get_data_parallel_world_size()
    mine = ROWS // data
    tokens = torch.randint(0, 250, (mine, WIDTH))
    batch = SequenceBatch.of(tokens, tokens, torch.full((mine,), WIDTH), None, None)
    runs = engine(chunks, architecture, micro_batch_size=1)

    def loss(sequence_index_b: torch.Tensor, logps_b: torch.Tensor) -> MicroBatchLoss:
        return MicroBatchLoss.of({"loss_sum": logps_b.sum(), "rows": torch.tensor(len(logps_b))})

    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    with Traffic(groups) as traffic:
        runs.logprobs(batch)
        runs.forward_backward(batch, loss, forward_only=False)
        optimizer.step()
    training = Training(
        architecture=architecture,
        element_bytes=4,
        split=split_of(layout),
        data_parallel=data,
        sequence_parallel=layout.sequence_parallel,
        distributed_optimizer=distributed,
        micro_batch_tokens=WIDTH,
        micro_batch_width=WIDTH,
        micro_batches=mine,
        logprob_chunk=16,
        on_gpu=False,
    )
    planned = stage_traffic(training, Step(rows=ROWS, width=WIDTH, forward_only=1), state.pipeline_stage())
    messages = {axis: sum(traffic.messages[key] for key in traffic.messages if key[0] == axis) for axis in groups}
    return {axis: (traffic.of(axis), getattr(planned, axis), messages[axis]) for axis in groups}, state.pipeline_stage()


PP2, PP2_VP2 = Layout(pipeline=2), Layout(pipeline=2, virtual=2)
# Batches of hidden states that the first and the last stage send: on in two forward passes, and back in one.
SENDS = {PP2: (2, 1), PP2_VP2: (4 + 1, 2 + 2)}
# The same in messages: eight micro-batches with gradients; three without, and an empty one where groups are of two.
MESSAGES = {PP2: (3 + 8, 8), PP2_VP2: (2 * (4 + 8) + 8, (4 + 8) + 2 * 8)}


@pytest.mark.parametrize(
    ("world_size", "layout", "distributed"),
    [
        (2, Layout(tensor=2), True),
        (2, Layout(tensor=2, sequence_parallel=True), True),
        (2, PP2, True),
        (2, PP2_VP2, True),
        (2, Layout(), True),
        (2, Layout(), False),
        pytest.param(4, Layout(), True, marks=pytest.mark.full),
        pytest.param(4, Layout(tensor=4), True, marks=pytest.mark.full),
        pytest.param(4, Layout(tensor=2, pipeline=2, virtual=2, sequence_parallel=True), True, marks=pytest.mark.full),
        pytest.param(4, Layout(tensor=2), False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_rank_sends_what_a_plan_says(
    world_size: int, layout: Layout, distributed: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """Within 2 %; what is not planned is the shapes of messages, norms and counts."""
    model = make_checkpoint(tmp_path, "llama", num_hidden_layers=LAYERS)
    for axes, stage in ranks.run(world_size, count, model, layout, distributed):
        for axis, (sent, planned, messages) in axes.items():
            assert sent == pytest.approx(planned, rel=0.02, abs=100), axis
            assert (messages > 0) == (planned > 0 or (axis == "data" and sent > 0)), axis
        if layout in SENDS:
            assert axes["pipeline"][2] == 2 * MESSAGES[layout][stage], "each follows one with its shape"
            assert axes["pipeline"][1] == ROWS * SENDS[layout][stage] * WIDTH * 64 * 4
