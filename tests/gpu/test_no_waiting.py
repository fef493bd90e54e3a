"""The host waits for the device at most a few times per step, and never within a micro-batch.

On a GPU torch itself rejects waits within the schedule and counts those of a step. Emulated devices report the line that
causes each wait.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.models.engine import engine as engine_module
from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss
from nemo_kto.models.engine.sequences import SequenceBatch
from tests.gpu.jobs import EXPERTS, IS_EMULATED, LORA, OF_FAMILY, STEPS, Workplace, on
from tests.gpu.test_jobs import PACKED, RECOMPUTE
from tests.helpers import lora_jobs
from tests.helpers.engines import engine

needs_gpu = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU")
ROWS, WIDTH = 6, 11
MAX_WAITS = 8  # per step, for any number of micro-batches, tensors and parameters


@pytest.fixture
def nccl_rank(tmp_path: Path) -> None:
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    state.init_distributed(layout=state.Layout(), seed=3)


@needs_gpu
@pytest.mark.usefixtures("nccl_rank")
def test_a_pass_does_not_wait(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, architecture = lora_jobs.build(tiny_llama, state.Layout(), None)
    runs = engine(chunks, architecture)
    tokens_BS = torch.randint(0, 256, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
    sequences = SequenceBatch.of(tokens_BS, tokens_BS.clone(), torch.full((ROWS,), WIDTH))

    def loss(_: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
        return MicroBatchLoss.of(
            {"loss_sum": -logprobs.response_b.sum(), "rows": torch.ones_like(logprobs.response_b).sum()}
        )

    def passes() -> None:
        runs.logprobs(sequences)
        runs.forward_backward(sequences, loss, forward_only=True)

    passes()  # loads kernels
    original, watched_calls = engine_module.get_forward_backward_func, []

    def watched() -> Any:
        schedule = original()

        def call(**arguments: Any) -> Any:
            watched_calls.append(arguments)
            torch.cuda.set_sync_debug_mode("error")  # torch raises where the host would wait
            try:
                return schedule(**arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    monkeypatch.setattr(engine_module, "get_forward_backward_func", watched)
    passes()
    assert len(watched_calls) == 2


@needs_gpu
@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("kto", ("model.reference.mode=swap",)),
        ("kto", ("model.reference.mode=cached",)),
        ("kto", ("model.reference.mode=adapter", *LORA)),
        ("dpo", ("model.reference.mode=swap",)),
    ],
    ids=["swap", "cached", "lora", "dpo"],
)
@pytest.mark.parametrize("micro_batch", [4, 1])
def test_a_step_waits_a_few_times(algorithm: str, overrides: tuple[str, ...], micro_batch: int, place: Workplace) -> None:
    name = f"waits-{algorithm}-{overrides[0].partition('=')[2]}-{micro_batch}"
    file = place.folder / f"{name}-steps.json"
    callback = f"{{_target_: tests.gpu.recorders.RecordWaits, file: {file}}}"
    once = (f"trainer.{algorithm}.limit_val_batches=0", f"model.micro_batch_size={micro_batch}")
    place.run(name, *on("gpu"), *overrides, *once, algorithm=algorithm, callbacks=[callback])
    steps = json.loads(file.read_text())
    assert len(steps) == STEPS
    assert all(0 < len(waits) <= MAX_WAITS for waits in steps[1:]), steps[1:]


EMULATED_JOBS = {
    "swapped": ("kto", ()),
    "swapped-from-host": ("kto", ("model.reference.device=cpu",)),
    "tp2": ("kto", ("trainer.devices=2", "model.tensor_model_parallel_size=2")),
    "pp2": ("kto", ("trainer.devices=2", "model.pipeline_model_parallel_size=2", "model.micro_batch_size=1")),
    "cached": ("kto", ("model.reference.mode=cached",)),
    "adapter": ("kto", (*LORA, "model.reference.mode=adapter")),
    "dpo-recompute": ("dpo", RECOMPUTE),
    "experts": ("kto", EXPERTS),
    "ep2": ("kto", (*EXPERTS, "trainer.devices=2", "model.expert_model_parallel_size=2")),
    "delta-nets": ("kto", (*OF_FAMILY["delta-nets"], *PACKED)),
}
# Outside of micro-batches, after the last one of a step: for the number of examples, the loss, ranks whose gradient is not
# finite, the norm of the gradient, and the signal of another rank; with experts also for their balance. Ranks that exchange
# tokens also wait before the first micro-batch, for the numbers of micro-batches of the samples and of the KL examples.
WAITS = {"experts": 6, "ep2": 8}
# megatron-core's token dispatcher, in addition: sizes of the permuted tokens and of their probabilities,
# numbers of tokens on the host.
DISPATCHER = {
    "masked_select @ megatron/core/transformer/moe/moe_utils.py(permute)": 2,
    "event synchronize @ megatron/core/transformer/moe/token_dispatcher.py(_maybe_dtoh_and_synchronize)": 1,
}
EXPERT_LAYERS = 3
MICRO_BATCHES, PASSES = 2, 4  # the policy and the reference, each of the samples and of the KL examples
# Copies to the device in micro-batches: of each pack, not of each layer or pass, the positions of its tokens and their
# places in chunks.
COPIES = {"delta-nets": 2 * 2 * MICRO_BATCHES}


class Wait(NamedTuple):
    """As tests.emulated_cuda.recorder writes it."""

    kind: str
    site: str
    in_micro_batch: bool
    times: int

    def __str__(self) -> str:
        return f"{self.times} {self.kind} @ {self.site}"

    @property
    def place(self) -> str:
        """Without the number of the line and the callers."""
        file, _, line_and_function = self.site.split(" < ")[0].partition(":")
        return f"{self.kind} @ {file}({line_and_function.partition('(')[2]}"


@pytest.mark.skipif(not IS_EMULATED, reason="needs emulated devices: make test-emulated")
@pytest.mark.parametrize("name", EMULATED_JOBS)
def test_each_wait_of_a_step_is_known(name: str, place: Workplace) -> None:
    """The first and the last step also start and end the run; they are not counted."""
    (algorithm, overrides), file = EMULATED_JOBS[name], place.folder / f"known-waits-{name}.json"
    callback = f"{{_target_: tests.emulated_cuda.recorder.RecordWaits, file: {file}}}"
    place.run(f"known-waits-{name}", *on("gpu"), *overrides, algorithm=algorithm, callbacks=[callback])
    steps = [[Wait(*wait) for wait in step] for step in json.loads(file.read_text())]
    assert len(steps) == STEPS
    passes = EXPERT_LAYERS * PASSES * {"experts": MICRO_BATCHES, "ep2": 1}.get(name, 0)
    for step in steps[1:-1]:
        in_micro_batch: Counter[str] = Counter()
        for wait in step:
            in_micro_batch[wait.place] += wait.times * wait.in_micro_batch
        assert +in_micro_batch == +Counter({found: each * passes for found, each in DISPATCHER.items()})
        others = [wait for wait in step if not wait.in_micro_batch]
        assert sum(wait.times for wait in others) <= WAITS.get(name, 5), "\n".join(map(str, others))
    for step in json.loads(file.with_suffix(".work").read_text())[1:-1]:
        work = [each for each in map(Wait._make, step["others"]) if each.in_micro_batch]
        copies = sum(each.times for each in work if each.kind == "copy to the device")
        assert copies <= COPIES.get(name, 0), "\n".join(map(str, work))
        # a copy reads which device the rank has
        assert sum(each.times for each in work if each.kind.startswith("probe")) <= copies, "\n".join(map(str, work))


@needs_gpu
def test_uploaded_tensors_are_unchanged() -> None:
    parts = [
        torch.arange(7),
        torch.arange(6).view(2, 3),
        None,
        torch.tensor([True, False]),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([1.5, -2.0]),
        torch.ones(2, device=device.current_device()),
    ]
    there = device.upload(parts)
    assert there[2] is None
    assert there[6] is parts[6]
    pairs = [(each, part) for each, part in zip(there, parts, strict=True) if part is not None]
    assert all(each.is_cuda and each.dtype == part.dtype for each, part in pairs)
    assert all(torch.equal(each.cpu(), part.cpu()) for each, part in pairs)
