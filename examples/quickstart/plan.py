"""How long the quickstart takes on this machine: a measurement of one second, and an estimate from it.

    python examples/quickstart/plan.py kto|dpo [--precision auto] [--steps N] [--out FILE]

Most of the time goes into matrix products. One second of products of the model's sizes measures the speed of this
machine, and the work of a run can be counted. QUICKSTART_STEPS (or --steps) sets the number of steps by hand, and
reduces the held-out examples too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from prepare import MAX_TOKENS, VALIDATION_BATCHES

from nemo_kto.device import device
from nemo_kto.device.precision import PRECISIONS, bf16_support, dtype_of

HELD_OUT = 200  # reviews, or pairs of reviews, to measure on

# SmolLM2-135M: weights that every token uses, and those of the output layer, which only response tokens use.
LAYER_WEIGHTS, OUTPUT_WEIGHTS = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536), 49152 * 576
PROMPT_TOKENS, RESPONSE_TOKENS = 7, 0.8 * MAX_TOKENS  # of an example, on average; a prompt is computed once for its answers
WIDTHS = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # inputs and outputs of a layer's matrices
TOKENS = 512  # of one product


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of an algorithm.

    Attributes:
        batch: examples (or pairs) per optimizer step.
        responses: responses per example.
        passes: cost of a response in training, in forward passes: of the reference and the policy, forward and backward.
        validation_passes: cost of a response in validation, in forward passes.
        steps: optimizer steps.
    """

    batch: int
    responses: int
    passes: float
    validation_passes: float
    steps: int


WORKLOADS = {
    # reference: example and KL example; policy: KL example, example forward and backward (twice the work of forward)
    "kto": Workload(batch=16, responses=1, passes=2 + 1 + 3, validation_passes=2 + 2, steps=20),
    # reference; policy forward, and backward with adapters, whose own gradients need little work
    "dpo": Workload(batch=16, responses=2, passes=1 + 2.2, validation_passes=1 + 1, steps=14),
}
# Seconds that do not depend on the number of examples: start of processes, unpacking, export, loading and sampling.
FIXED_SECONDS = 60.0
# Seconds of a pass besides matrix products, on a CPU: attention, norms, communication between ranks, the optimizer.
OTHER_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the quickstart will do here.

    Attributes:
        precision: bf16 or 32, of training and of measuring.
        why: reason for the precision.
        ranks: number of tensor-parallel ranks.
        gflops: measured speed of matrix products, 10^9 floating-point operations per second.
        steps: optimizer steps.
        train: examples (or pairs) to learn from.
        held_out: examples (or pairs) to measure on.
        minutes: estimated time.
    """

    precision: str
    why: str
    ranks: int
    gflops: float
    steps: int
    train: int
    held_out: int
    minutes: float


def matmul_speed(dtype: torch.dtype, *, ranks: int, seconds: float = 1.0) -> float:
    """Floating-point operations per second of ``ranks`` threads that multiply the model's matrices at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // ranks))  # as the ranks of a run share the processors
    try:
        with ThreadPoolExecutor(ranks) as pool:
            return sum(pool.map(lambda _: _speed(dtype, seconds), range(ranks)))
    finally:
        torch.set_num_threads(threads)


def _speed(dtype: torch.dtype, seconds: float) -> float:
    """The same for one rank: forward and backward through one layer's matrices, repeatedly."""
    place = device.current_device()
    weights = [torch.randn(wide, narrow, device=place, dtype=dtype) for narrow, wide in WIDTHS]
    inputs = [torch.randn(TOKENS, narrow, device=place, dtype=dtype) for narrow, _ in WIDTHS]
    gradients = [torch.randn(TOKENS, wide, device=place, dtype=dtype) for _, wide in WIDTHS]

    def products() -> None:
        for weight, given, gradient in zip(weights, inputs, gradients, strict=True):
            given @ weight.t()
            gradient @ weight
            gradient.t() @ given
        device.synchronize()

    products()  # warm-up
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        products()
        rounds += 1
    work = rounds * 3 * sum(2 * TOKENS * narrow * wide for narrow, wide in WIDTHS)
    return work / (time.perf_counter() - began)


def pass_work() -> float:
    """Floating-point operations of one forward pass over a prompt with its response."""
    return 2 * ((PROMPT_TOKENS + RESPONSE_TOKENS) * LAYER_WEIGHTS + RESPONSE_TOKENS * OUTPUT_WEIGHTS)


def make_plan(
    algorithm: str, *, precision: str, why: str, flops: float, other_seconds: float, ranks: int, steps: int | None = None
) -> Plan:
    """Estimate the time of a run.

    Args:
        algorithm: kto or dpo.
        precision: bf16 or 32.
        why: reason for the precision.
        flops: result of :func:`matmul_speed`, operations per second.
        other_seconds: seconds of a pass besides its matrix products.
        ranks: number of tensor-parallel ranks.
        steps: optimizer steps; None: enough to learn.
    """
    workload = WORKLOADS[algorithm]
    held_out = HELD_OUT if steps is None else min(HELD_OUT, max(32, 4 * steps))
    seconds_per_pass = pass_work() / flops + other_seconds
    scoring = 2 * held_out * workload.responses * seconds_per_pass  # by the original and the aligned model
    responses = workload.batch * workload.responses
    step = responses * workload.passes * seconds_per_pass
    validation = VALIDATION_BATCHES * responses * workload.validation_passes * seconds_per_pass
    steps = steps or workload.steps
    return Plan(
        precision=precision,
        why=why,
        ranks=ranks,
        gflops=flops / 1e9,
        steps=steps,
        train=steps * workload.batch,
        held_out=held_out,
        minutes=(FIXED_SECONDS + scoring + validation + steps * step) / 60,
    )


def choose_precision(precision: str) -> tuple[str, str]:
    """bf16 or 32, and the reason, by the rule of trainer.precision."""
    if (given := PRECISIONS[precision]) != "auto":
        return given, "set by the user"
    support = bf16_support()
    return ("bf16" if support.native else "32"), support.why


def plan_here(algorithm: str, *, precision: str, steps: int | None) -> Plan:
    """The plan for this machine.

    Args:
        algorithm: kto or dpo.
        precision: a value of trainer.precision.
        steps: optimizer steps; None: enough to learn.
    """
    chosen, why = choose_precision(precision)
    ranks = min(2, device.device_count() or len(os.sched_getaffinity(0)))
    flops = matmul_speed(dtype_of(chosen), ranks=ranks)
    other = 0.0 if device.on_gpu() else OTHER_SECONDS
    return make_plan(algorithm, precision=chosen, why=why, flops=flops, other_seconds=other, ranks=ranks, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the quickstart takes on this machine.")
    parser.add_argument("algorithm", choices=WORKLOADS)
    parser.add_argument("--precision", default="auto", choices=PRECISIONS)
    parser.add_argument("--steps", type=int, default=os.environ.get("QUICKSTART_STEPS") or None)
    parser.add_argument("--out", type=Path, help="also write the plan to this file, as JSON")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"the number of steps (QUICKSTART_STEPS) must be at least 1, got {arguments.steps}")
    plan = plan_here(arguments.algorithm, precision=arguments.precision, steps=arguments.steps)
    what = "pairs of reviews" if arguments.algorithm == "dpo" else "reviews"
    print(f"precision {plan.precision}: {plan.why}")
    print(f"{plan.gflops:.0f} GFLOP/s in matrix products, so this will take about {max(1, round(plan.minutes))} minutes:")
    print(f"{plan.steps} steps, {plan.train} {what} to learn from and {plan.held_out} held-out ones to measure on")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(asdict(plan)) + "\n")


if __name__ == "__main__":
    main()
