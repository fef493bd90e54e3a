"""Default number of tokens of a micro-batch on GPUs: the smallest power of two with which a step wastes little time.

The constants are those of an H200 (NVIDIA's data sheet) on every GPU, so that plans and runs of one layout differ only where
their memory does; docs/gpu/arithmetic.md has the arithmetic. None of it has been measured.
"""

from __future__ import annotations

from typing import NamedTuple

from nemo_kto.planner.memory import Training

MIN_TOKENS, MAX_TOKENS = 2048, 65536  # of a rank
# With fewer tokens, the matrix products of most models have too few tiles for all processors of a GPU.
_PRODUCTS = 8192
_FLOPS = 0.45 * 989e12  # reached in training, per second
_BANDWIDTH = 0.85 * 4.8e12  # bytes per second
_LAUNCHES = 2e-4  # seconds in which the host launches the kernels of a layer's forward pass: about 30, 6 to 7 us each
_LAUNCH_SHARE = 0.5  # of the time in which the GPU runs them: the rest is a reserve for the host's other work
_ACCUMULATION_SHARE = 0.01  # of a step, for adding the weight gradients of a micro-batch to their fp32 sums
_SUM_BYTES = 8  # read and written per weight
# Of a pipeline, per stage, if all sequences had the maximum length: usually they have about a quarter of it, so that four
# micro-batches per stage remain, with a bubble of at most a fifth of the step.
_IN_PIPELINE = 16


class Tokens(NamedTuple):
    """Number of tokens of a micro-batch on each rank, and why."""

    number: int
    reason: str


def sufficient_tokens(training: Training, *, rank_tokens: float) -> Tokens:
    """Return the number of tokens from which on larger micro-batches would gain little.

    ``rank_tokens`` are those of a rank's share of the global batch if all sequences had the maximum length. The number of
    tokens in ``training`` has no effect.
    """
    flops, stages = training.flops, training.split.stages
    forward = flops.forward.per_token / training.tensor_parallel  # of all layers
    trained = max(
        sum(each.numel for each in stage if each.trained and ".layers." in each.name) for stage in training.parameters
    )
    accumulation = _SUM_BYTES * trained * stages / _BANDWIDTH  # seconds
    of_training = (flops.forward.per_token + flops.backward.per_token) / training.tensor_parallel
    needs = {
        _LAUNCHES / _LAUNCH_SHARE * _FLOPS * training.architecture.num_layers / forward: "kernel launches",
        accumulation / _ACCUMULATION_SHARE * _FLOPS / of_training: "adding up weight gradients",
        float(_PRODUCTS): "matrix products",
    }
    largest = max(needs)
    number, reason = min(MAX_TOKENS, _power_of_two(largest)), f"enough for {needs[largest]}"
    limit, of_limit = _power_of_two(rank_tokens), "a rank's share of the batch"
    if stages > 1:  # rounded down
        limit = _power_of_two(rank_tokens / (_IN_PIPELINE * stages) + 1) // 2
        of_limit = "more would leave too few micro-batches for the pipeline"
    return Tokens(number, reason) if number <= limit else Tokens(max(MIN_TOKENS, limit), of_limit)


def _power_of_two(number: float) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, int(-(-number // 1)) - 1).bit_length()
