"""Micro-batches: limits of their size, packing, the default number of tokens on GPUs, and the effect of shared prompts.

The default is the smallest power of two with which a step wastes little time. Its constants are those of an H200 (NVIDIA's
data sheet) on every GPU, so that plans and runs of one layout differ only where their memory does; docs/gpu/arithmetic.md
has the arithmetic. None of it has been measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device import device
from nemo_kto.device.precision import PRECISIONS
from nemo_kto.layers.packing import MAX_HEAD_DIM
from nemo_kto.memory.rank_memory import Training, power_of_two
from nemo_kto.models.engine.sequences import MicroBatchLimits, SequenceBatch, joined, width_multiple
from nemo_kto.models.flops import ModelFlops, Passes

# Number of tokens per micro-batch and rank. On a GPU, small micro-batches waste time on kernel launches and gradient
# accumulation; :func:`sufficient_tokens` derives the number, and this one is for a run that was not planned. A CPU has no
# launch overhead, and in larger micro-batches the sequences differ more in length, so that padding costs as much as is
# gained.
_GPU_TOKENS, _CPU_TOKENS = 8192, 512
# Tokens of a chunk of logits. A GPU reads and writes the fp32 gradient of the output weight once a chunk.
MIN_TOKENS, MAX_TOKENS = 2048, 65536  # of a rank
# With fewer tokens, the matrix products of most models have too few tiles for all processors of a GPU.
_PRODUCTS = 8192
_FLOPS = 0.45 * 989e12  # reached in training, per second
_BANDWIDTH = 0.85 * 4.8e12  # bytes per second
_LAUNCH_SHARE = 0.5  # of the time in which the GPU runs them: the rest is a reserve for the host's other work
_ACCUMULATION_SHARE = 0.01  # of a step, for adding the weight gradients of a micro-batch to their fp32 sums
_SUM_BYTES = 8  # read and written per weight
_IN_PIPELINE = 4  # micro-batches of each stage: with these the bubble is at most a fifth of a step
FORWARD_LAUNCHES = 2e-4  # seconds of the host for the kernels of a layer, about 30 of 6 to 7 microseconds; an assumption
MEAN_LENGTH = 0.25  # of the rows, as a fraction of the maximum length, before they are read; an assumption


def sufficient_tokens(training: Training, *, longest: float, counted: float | None) -> tuple[int, str]:
    """Return the number of tokens on each rank from which on larger micro-batches would gain little, and why.

    ``longest`` and ``counted`` are the tokens of a rank's share of the global batch if all sequences had the maximum length,
    and on average over the training rows; None before they are read. The number of tokens in ``training`` has no effect.
    """
    flops, stages = training.flops, training.split.stages
    forward = flops.forward.per_token / training.tensor_parallel  # of all layers
    trained = max(sum(each.total for each in stage if each.trained and each.layers) for stage in training.parameters)
    accumulation = _SUM_BYTES * trained * stages / _BANDWIDTH  # seconds
    of_training = (flops.forward.per_token + flops.backward.per_token) / training.tensor_parallel
    needs = {
        FORWARD_LAUNCHES / _LAUNCH_SHARE * _FLOPS * training.architecture.num_layers / forward: "kernel launches",
        accumulation / _ACCUMULATION_SHARE * _FLOPS / of_training: "adding up weight gradients",
        float(_PRODUCTS): "matrix products",
    }
    largest = max(needs)
    number, reason = min(MAX_TOKENS, power_of_two(largest)), f"enough for {needs[largest]}"
    limit, of_limit = power_of_two(longest), "a rank's share of the batch"
    if stages > 1:  # rounded down
        tokens = longest * MEAN_LENGTH if counted is None else counted
        limit = power_of_two(tokens / (_IN_PIPELINE * stages) + 1) // 2
        of_rows = "" if counted is not None else f", if rows have a mean of {MEAN_LENGTH:.0%} of the maximum length"
        of_limit = f"more would leave too few micro-batches for the pipeline{of_rows}"
    return (number, reason) if number <= limit else (max(MIN_TOKENS, limit), of_limit)


def multiple_of(run: ResolvedRun, *, on_gpu: bool | None = None) -> int:
    """Return :func:`width_multiple` for the layout of a run."""
    model = run.cfg.model
    return width_multiple(
        tensor_parallel=model.tensor_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        context_parallel=model.context_parallel_size,
        fp8=model.fp8 is not None,
        on_gpu=on_gpu,
    )


def micro_batch_limits(run: ResolvedRun, *, on_gpu: bool | None = None) -> MicroBatchLimits:
    """Return the configured limits of a micro-batch, or the defaults for the device.

    ``on_gpu`` is None for the device of this rank; plans pass a value, because they may be for another machine.
    """
    packed, multiple = packing_of(run, on_gpu=on_gpu).is_on, multiple_of(run, on_gpu=on_gpu)
    model, on_gpu = run.cfg.model, device.on_gpu() if on_gpu is None else on_gpu
    prompts, tokens, shares = model.micro_batch_size, model.micro_batch_tokens, model.data.share_prompts
    if shares == "auto":  # where shared prompts are supported and tested
        shares = not (on_gpu or model.context_parallel_size > 1)
    if prompts is None and tokens is None:
        tokens = run.micro_batch_tokens or (_GPU_TOKENS if on_gpu else _CPU_TOKENS) * model.context_parallel_size
    return MicroBatchLimits(
        prompts=prompts,
        tokens=tokens,
        multiple=multiple,
        packed=packed,
        context_parallel=model.context_parallel_size,
        group=run.split.group,
        share_prompts=shares,
    )


class Packing(NamedTuple):
    """Whether sequences are packed, and why."""

    is_on: bool
    reason: str


def packing_of(run: ResolvedRun, *, on_gpu: bool | None = None) -> Packing:
    """Return the value of model.data.packing; ``on_gpu`` as for :func:`micro_batch_limits`.

    ``auto`` packs on GPUs if one kernel computes the attention of a whole pack. A plan assumes that the machine has such a
    kernel, which Transformer Engine and newer versions of torch contain; a rank looks for it.
    """
    model, here = run.cfg.model, on_gpu is None
    if model.data.packing != "auto":
        return Packing(model.data.packing, "set by the user")
    if not (device.on_gpu() if on_gpu is None else on_gpu):
        return Packing(False, "no GPU")
    if model.micro_batch_size is not None:
        return Packing(False, "model.micro_batch_size is set")
    if PRECISIONS[run.cfg.trainer.precision] == "32":
        return Packing(False, "fp32")
    if run.architecture.attends_in_blocks:
        return Packing(False, "a soft cap or sinks in the attention")
    if (size := run.architecture.largest_head) > MAX_HEAD_DIM:
        return Packing(False, f"heads of {size} values, of which kernels for packs take at most {MAX_HEAD_DIM}")
    windows = any(window is not None for window in run.architecture.windows)
    if model.context_parallel_size > 1 and (windows or run.architecture.unsupported_by_te):
        return Packing(False, "context parallelism with layers that Transformer Engine cannot pack")
    if here and not device.gpu_has_bf16():
        return Packing(False, "a GPU without bf16 instructions")
    if here and not _attends_in_one_kernel(run):
        return Packing(False, "neither Transformer Engine nor torch 2.11 is installed")
    return Packing(True, "the default on GPUs")


def _attends_in_one_kernel(run: ResolvedRun) -> bool:
    """Return whether this machine has a kernel for the attention of a pack; context parallelism needs Transformer Engine."""
    from nemo_kto.device.kernels import uses_transformer_engine, varlen_attention  # not for a plan: imports megatron-core

    if uses_transformer_engine(run.dtype) and not run.architecture.unsupported_by_te:
        return True
    return run.cfg.model.context_parallel_size == 1 and varlen_attention(run.dtype) is not None


def repeats_keys(run: ResolvedRun) -> bool:
    """Return whether attention of packs gets keys and values repeated for each query head, on the GPU of this rank."""
    if not device.on_gpu():
        return False
    from nemo_kto.models import gpt  # not for a plan: imports megatron-core

    return gpt.repeats_keys(run.architecture, run.dtype)


_BATCHES = 16  # global batches that are measured: the first ones of the first epoch, in its random order


@dataclass(frozen=True, kw_only=True)
class SharedPrompts:
    """Computed part of a step, as fractions of that of separate sequences; 1 if nothing is shared."""

    tokens: float = 1.0  # mean over the passes of a step, forward and backward
    flops: float = 1.0
    trained: float = 1.0  # tokens of the pass with gradient
    largest: float = 1.0  # the same of the micro-batch that shares the least
    examples: int = 0  # number of examples measured

    def __str__(self) -> str:
        """Describe the part that is saved."""
        if self.tokens == 1:
            return f"none in {self.examples:,} examples"
        saved = f"{1 - self.tokens:.1%} of the tokens and {1 - self.flops:.1%} of the FLOPs"
        return f"save {saved} of {self.examples:,} examples"


SEPARATE = SharedPrompts()


def measure(run: ResolvedRun, batches: Iterable[Mapping[str, Any]], limits: MicroBatchLimits) -> SharedPrompts:
    """Measure the first global ``batches`` of the training rows; with several data-parallel ranks, the share of one.

    The micro-batches are those of the run, so the FLOPs saved are ``perf/shared_fraction`` of these steps.
    """
    flops = ModelFlops.of_model(run.architecture, adapters=run.adapters)
    sums = Counter[str]()
    largest, examples = 0.0, 0
    for batch in islice(batches, _BATCHES):
        parts = run.cfg.recipe.sequences(batch)
        examples += len(parts[0]) // parts[0].answers
        largest = max(largest, parts[0].largest_part(limits))
        for sequences, of_pass, passes in _passes(run, parts, limits):
            prompts, per_pass, count = sequences.shared_prompts(of_pass), flops.of_passes(passes), sum(passes)
            for name, times in (("tokens", count), ("trained", count if passes.backward else 0)):
                sums[name] += times * int(sequences.lengths_B.sum())
                sums[f"saved {name}"] += times * sum(prompts)
            sums["flops"] += int(per_pass.of(sequences))
            sums["saved flops"] += int(per_pass.of_prompts(prompts))
    computed = {name: 1 - sums[f"saved {name}"] / sums[name] for name in ("tokens", "trained", "flops")}
    return SharedPrompts(**computed, largest=largest, examples=examples)


def _passes(
    run: ResolvedRun, parts: Sequence[SequenceBatch], limits: MicroBatchLimits
) -> Iterator[tuple[SequenceBatch, MicroBatchLimits, Passes]]:
    """Yield the passes of a step: sequences, limits of their micro-batches, and how often they pass through the model."""
    trained, *kl_examples = parts
    size, (forward, disabled) = run.cfg.loss.log_prob_forward_micro_batch_size, run.reference_passes
    reference = joined(parts, limits, in_fp32=run.dtype.itemsize == 4) if forward + disabled else []
    yield trained, limits, Passes(forward=1, backward=1)
    for sequences, passes in (
        *((each, Passes(forward=1)) for each in (*kl_examples, *[trained] * run.cfg.loss.definition.looks_ahead)),
        *((each, Passes(forward=forward, disabled=disabled)) for each in reference),
    ):
        yield sequences, limits.forward_only(size, answers=sequences.answers), passes
