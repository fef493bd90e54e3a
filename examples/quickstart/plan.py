"""What fits into the time of the quickstart on this machine: a measurement of one second, and what follows from it.

    python examples/quickstart/plan.py kto|dpo [--precision auto] [--steps N] [--out FILE]

The time goes into matrix products. One second of those that the model is made of says how fast this machine does them, and
the work of a run can be counted, so the length of the run is chosen to fit: long enough to learn, and no longer than a few
minutes. QUICKSTART_STEPS (or --steps) sets the number of steps by hand, and cuts the held-out rows likewise.
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
from prepare import MOST_TOKENS

from nemo_kto.parallel import device
from nemo_kto.parallel.precision import DTYPES, PRECISIONS, bf16_support

MINUTES = {"bf16": 5.0, "32": 8.0}  # that the run may take, by precision
HELD_OUT = 200  # reviews, or pairs of them, that measure what was learned

# SmolLM2-135M: weights that every token meets, and those of the output, which the tokens of an answer meet.
LAYER_WEIGHTS, OUTPUT_WEIGHTS = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536), 49152 * 576
PROMPT_TOKENS, ANSWER_TOKENS = 24, 0.8 * MOST_TOKENS  # of a row, on average
WIDTHS = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # inputs and outputs of a layer's matrices
TOKENS = 512  # that go through them at once


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The work of an algorithm.

    Attributes:
        batch: rows of an optimizer step.
        answers: in a row.
        passes: what an answer costs in training, in forward passes: of the reference and the policy, forward and backward.
        fewest, most: optimizer steps between which the time decides.
    """

    batch: int
    answers: int
    passes: float
    fewest: int
    most: int


RECIPES = {
    # reference: answer and KL answer; policy: KL answer, answer forward and backward (twice the work of forward)
    "kto": Recipe(batch=16, answers=1, passes=2 + 1 + 3, fewest=20, most=24),
    # reference; policy forward, and backward with adapters, whose own gradients are hardly work
    "dpo": Recipe(batch=16, answers=2, passes=1 + 2.2, fewest=14, most=20),
}
# Seconds that do not depend on the number of rows: processes start, the model is unpacked, exported, loaded, sampled from.
FIXED_SECONDS = 75.0
# Seconds of a pass that are no matrix products, on a CPU: attention, norms, what the ranks tell each other, the optimizer.
OTHER_SECONDS = {"bf16": 0.05, "32": 0.055}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the quickstart will do here.

    Attributes:
        precision: bf16 or 32, of training and of measuring.
        why: where the precision comes from.
        ranks: that share every layer.
        gflops: measured speed of matrix products, 10^9 floating-point operations a second.
        steps: optimizer steps.
        train: rows to learn from.
        held_out: rows to measure on.
        minutes: that it will take.
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
    """Floating-point operations a second of ``ranks`` that multiply matrices like the model's side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // ranks))  # as the ranks of a run share the processors
    try:
        with ThreadPoolExecutor(ranks) as pool:
            return sum(pool.map(lambda _: _speed(dtype, seconds), range(ranks)))
    finally:
        torch.set_num_threads(threads)


def _speed(dtype: torch.dtype, seconds: float) -> float:
    """The same of one rank: forward and backward through one layer's matrices, again and again."""
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

    products()  # the first round sets things up
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        products()
        rounds += 1
    work = rounds * 3 * sum(2 * TOKENS * narrow * wide for narrow, wide in WIDTHS)
    return work / (time.perf_counter() - began)


def pass_work() -> float:
    """Floating-point operations of one answer, with its prompt, once forward through the model."""
    return 2 * ((PROMPT_TOKENS + ANSWER_TOKENS) * LAYER_WEIGHTS + ANSWER_TOKENS * OUTPUT_WEIGHTS)


def make_plan(
    algorithm: str, *, precision: str, why: str, flops: float, other_seconds: float, ranks: int, steps: int | None = None
) -> Plan:
    """What fits into the time.

    Args:
        algorithm: kto or dpo.
        precision: bf16 or 32.
        why: where that comes from.
        flops: what :func:`matmul_speed` gave.
        other_seconds: of a pass, besides its matrix products.
        ranks: that share every layer.
        steps: optimizer steps, if they are not to be chosen.
    """
    recipe = RECIPES[algorithm]
    held_out = HELD_OUT if steps is None else min(HELD_OUT, max(4, 4 * steps))
    seconds_a_pass = pass_work() / flops + other_seconds
    scoring = 2 * held_out * recipe.answers * seconds_a_pass  # by the model before and the model after
    step = recipe.batch * recipe.answers * recipe.passes * seconds_a_pass
    if steps is None:
        fitting = (0.9 * 60 * MINUTES[precision] - FIXED_SECONDS - scoring) / step
        steps = max(recipe.fewest, min(recipe.most, int(fitting)))
    return Plan(
        precision=precision,
        why=why,
        ranks=ranks,
        gflops=flops / 1e9,
        steps=steps,
        train=steps * recipe.batch,
        held_out=held_out,
        minutes=(FIXED_SECONDS + scoring + steps * step) / 60,
    )


def choose_precision(precision: str) -> tuple[str, str]:
    """bf16 or 32, and why, by the rule of trainer.precision."""
    if (given := PRECISIONS[precision]) != "auto":
        return given, "as asked"
    support = bf16_support()
    return ("bf16" if support.native else "32"), support.why


def plan_here(algorithm: str, *, precision: str, steps: int | None) -> Plan:
    """The plan for this machine.

    Args:
        algorithm: kto or dpo.
        precision: a value of trainer.precision.
        steps: optimizer steps, if they are not to be chosen.
    """
    chosen, why = choose_precision(precision)
    ranks = min(2, device.device_count() or len(os.sched_getaffinity(0)))
    flops = matmul_speed(DTYPES[chosen], ranks=ranks)
    other = 0.0 if device.on_gpu() else OTHER_SECONDS[chosen]
    return make_plan(algorithm, precision=chosen, why=why, flops=flops, other_seconds=other, ranks=ranks, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="What fits into the time of the quickstart on this machine.")
    parser.add_argument("algorithm", choices=RECIPES)
    parser.add_argument("--precision", default="auto", choices=PRECISIONS)
    parser.add_argument("--steps", type=int, default=os.environ.get("QUICKSTART_STEPS") or None)
    parser.add_argument("--out", type=Path, help="also write the plan there, as JSON")
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
