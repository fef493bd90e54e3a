"""Part of a step that is computed if answers share their prompts, measured on the rows of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.models.engine.sequences import MicroBatchLimits, SequenceBatch, joined
from nemo_kto.models.flops import ModelFlops, Passes

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
        parts = run.cfg.recipe.model_class().sequences(batch)
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
        *((each, Passes(forward=1)) for each in (*kl_examples, *[trained] * run.cfg.loss.record.looks_ahead)),
        *((each, Passes(forward=forward, disabled=disabled)) for each in reference),
    ):
        yield sequences, limits.forward_only(size, answers=sequences.answers), passes
