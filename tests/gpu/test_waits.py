"""Where the host waits for the device, in jobs on emulated devices: not in a micro-batch, and a few times in a step."""

from __future__ import annotations

import json
from collections import Counter
from typing import NamedTuple

import pytest

from tests.gpu.jobs import EXPERTS, IS_EMULATED, LORA, STEPS, Workplace, on

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="needs emulated devices: make test-emulated")

MAX_WAITS_OF_A_STEP = 15  # those of megatron-core's token dispatcher come on top
RECOMPUTE = (
    "model.activations_checkpoint_granularity=full",
    "model.activations_checkpoint_method=uniform",
    "model.activations_checkpoint_num_layers=1",
)
JOBS = {
    "swapped": ("kto", ()),
    "tp2": ("kto", ("trainer.devices=2", "model.tensor_model_parallel_size=2")),
    "cached": ("kto", ("model.reference.mode=cached",)),
    "adapter": ("kto", (*LORA, "model.reference.mode=adapter")),
    "dpo-recompute": ("dpo", RECOMPUTE),
    "experts": ("kto", EXPERTS),
}
# megatron-core's token dispatcher: sizes of the permuted tokens and of their probabilities, numbers of tokens on the host.
DISPATCHER = {
    "masked_select @ megatron/core/transformer/moe/moe_utils.py(permute)": 2,
    "event synchronize @ megatron/core/transformer/moe/token_dispatcher.py(_maybe_dtoh_and_synchronize)": 1,
}
EXPERT_LAYERS = 3
MICRO_BATCHES, PASSES = 2, 4  # the policy and the reference, each of the samples and of the KL examples


class Wait(NamedTuple):
    """As tests.emulated_cuda.noted writes it."""

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


@pytest.mark.parametrize("name", JOBS)
def test_the_host_waits_seldom(name: str, place: Workplace) -> None:
    """The first and the last step are left out: they begin and end the run."""
    (algorithm, overrides), file = JOBS[name], place.folder / f"waits-{name}.json"
    callback = f"{{_target_: tests.emulated_cuda.noted.WriteWaits, file: {file}}}"
    place.run(f"waits-{name}", *on("gpu"), *overrides, algorithm=algorithm, callbacks=[callback])
    steps = [[Wait(*wait) for wait in step] for step in json.loads(file.read_text())]
    assert len(steps) == STEPS
    passes = EXPERT_LAYERS * MICRO_BATCHES * PASSES if name == "experts" else 0
    for step in steps[1:-1]:
        in_micro_batch: Counter[str] = Counter()
        for wait in step:
            in_micro_batch[wait.place] += wait.times * wait.in_micro_batch
        assert +in_micro_batch == +Counter({found: each * passes for found, each in DISPATCHER.items()})
        others = [wait for wait in step if not wait.in_micro_batch]
        assert sum(wait.times for wait in others) <= MAX_WAITS_OF_A_STEP, "\n".join(map(str, others))
