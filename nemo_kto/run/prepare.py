"""Preparation of a run before its model is built: models and precision, checks, data, resume checks, and memory."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron.core import parallel_state

from nemo_kto.checkpoint.manager import checkpoint_dtype
from nemo_kto.config.resolved import MODEL_KEYS, ResolvedRun, value_of, with_value
from nemo_kto.config.rules.layout_rules import check_gpu
from nemo_kto.device import device
from nemo_kto.device.precision import FORCED, MAX_SLOWDOWN, PRECISIONS, bf16_support, dtype_of
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.memory.hardware import these_machines
from nemo_kto.memory.micro_batches import micro_batch_limits, repeats_keys
from nemo_kto.memory.run_plan import Machines, check_memory, place_reference, size_micro_batches
from nemo_kto.model_files.checkpoint_files import find_checkpoints
from nemo_kto.model_files.hub import is_hub_name, pin
from nemo_kto.models.engine.sequences import MicroBatchLimits
from nemo_kto.run.data import (
    RunData,
    build_data,
    check_number_of_rows,
    log_warnings,
    model_tokenizer,
    read_splits,
    template_date,
)
from nemo_kto.run.policy import check_sources
from nemo_kto.run.resume import Resumption, look_for_run
from nemo_kto.run.samples import SamplePrompts, build_prompts

logger = logging.getLogger(__name__)


def agree_between_ranks(run: ResolvedRun) -> ResolvedRun:
    """Return the run with rank 0's models and precision; collective, before anything else is read or built."""
    run = _agree_on_models(run)
    return run.with_precision(*state.from_rank_zero(partial(choose_precision, run), doing="choosing the precision"))


def _agree_on_models(run: ResolvedRun) -> ResolvedRun:
    """Return the run with rank 0's revisions of hub models, which are downloaded where they are missing; collective.

    A rank that started before its machine asked the hub may have found an earlier revision in the cache.
    """
    cfg, named = run.cfg, {key: str(value_of(run.cfg, key)) for key in MODEL_KEYS}
    hub = {key: name for key, name in named.items() if is_hub_name(name)}
    if not hub:
        return run
    chosen = state.from_rank_zero(lambda: hub, doing="choosing the model's revision")

    def download() -> None:
        nonlocal cfg
        for key, name in chosen.items():
            cfg = with_value(cfg, key, pin(name, leads=False))

    state.raise_together(state.attempt(download), "{}")
    return ResolvedRun.of(cfg, gpus=run.gpus)


def choose_precision(run: ResolvedRun) -> tuple[str, str]:
    """Return bf16 or 32 for trainer.precision, and why.

    With auto, a resumed run keeps the precision of its newest checkpoint; a new run uses bf16 if the machine computes faster
    with it. Raises UserError for bf16 on a CPU that is too slow with it, unless it is forced.
    """
    precision, reason, resumed = PRECISIONS[run.cfg.trainer.precision], "set by the user", False
    if precision == "auto" and run.cfg.exp_manager.resume_if_exists and (saved := find_checkpoints(run.checkpoints)):
        dtype = checkpoint_dtype(saved[-1].folder)
        precision = next((name for name in ("bf16", "32") if dtype_of(name) == dtype), "auto")
        resumed, reason = precision != "auto", "that of the checkpoint from which the run is resumed"
    if precision == "32":
        return precision, reason
    support = bf16_support()
    if precision == "auto":
        return "bf16" if support.native else "32", support.why
    if not support.native:
        remedy = "start a new run with trainer.precision=32 in another folder" if resumed else "use auto or 32"
        if support.too_slow and run.cfg.trainer.precision != FORCED:
            text = (
                f"trainer.precision must not be bf16 where it is more than {MAX_SLOWDOWN} times slower than fp32, got bf16"
            )
            raise UserError(f"{text}, and {support.why}; {remedy}, or force it with trainer.precision={FORCED}")
        logger.warning(f"trainer.precision is bf16, but {support.why}; {remedy}")
    return precision, reason


def check_machines(run: ResolvedRun) -> Machines:
    """Return the machines of the ranks; all ranks raise UserError if one cannot run the configuration. Collective."""
    state.raise_together(state.attempt(partial(check_gpu, run)), "{}")
    world_size = state.world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or max(1, world_size // run.cfg.trainer.num_nodes))
    machines = replace(these_machines(run, ranks=world_size, local=local, timed=False), repeats_keys=repeats_keys(run))
    state.raise_together(state.attempt(partial(check_memory, run, machines)), "{}")
    return machines


class Start(NamedTuple):
    """Data of a run, and the result of the resume checks."""

    data: RunData
    samples: SamplePrompts | None  # None without samples
    resumption: Resumption


def prepare(run: ResolvedRun, *, data_parallel: tuple[int, int] | None = None) -> Start:
    """Check the weights, read, tokenise and split the rows, and run the resume checks on the run folder; collective.

    The tokenised rows are cached. ``data_parallel``: data-parallel rank and size; None for those of this rank. Raises
    UserError if the weights are of another model, the data cannot be used or are too few, or the run cannot be resumed with
    this configuration.
    """
    state.on_rank_zero(partial(check_sources, run), "{}")
    tokenizer = model_tokenizer(run.files)
    date = state.from_rank_zero(partial(template_date, run), doing="reading the date of the run")
    with state.main_process_first(doing="reading and tokenising the rows"):
        splits = read_splits(
            run,
            tokenizer,
            date=date,
            shows_progress=state.is_rank_zero(),
            cache_verified=not state.is_first_of_machine(),  # by the first process of the machine
        )
    rank, size = data_parallel or (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    check_number_of_rows(run.cfg, 0 if splits.train is None else len(splits.train), data_parallel=size)
    if state.is_rank_zero():
        log_warnings(run.cfg, splits)
    data = build_data(run, splits, tokenizer=tokenizer, date=date, rank=rank, size=size)
    samples = build_prompts(run, tokenizer, splits, date=date)
    return Start(data=data, samples=samples, resumption=look_for_run(run, data))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Size of the micro-batches, and memory of swapped weights of the reference."""

    limits: MicroBatchLimits
    micro_batch_tokens: int | None  # default of model.micro_batch_tokens on GPUs; None elsewhere, or if a limit is set
    micro_batch_reason: str
    reference_on_gpu: bool
    reference_memory: str  # "gpu" or "cpu"; empty if no weights are swapped
    reference_reason: str

    @classmethod
    def of(cls, planned: ResolvedRun) -> Placement:
        """Return the placement of a run whose memory was planned, or with the defaults of the device."""
        return cls(
            limits=micro_batch_limits(planned),
            micro_batch_tokens=planned.micro_batch_tokens,
            micro_batch_reason=planned.micro_batch_reason,
            reference_on_gpu=planned.reference_on_gpu,
            reference_memory=planned.reference_memory,
            reference_reason=planned.reference_memory_reason,
        )


def fit_to_memory(run: ResolvedRun, data: RunData, machines: Machines) -> Placement:
    """Choose the size of micro-batches on GPUs and the memory of swapped reference weights, on rank 0; collective.

    Rank 0 warns if the run may need more memory than its ranks have.
    """
    planned, train = run, data.splits.in_use["train"].counts
    longest = min(max(examples.counts.longest for examples in data.splits.in_use.values()), run.cfg.seq_length)
    if device.on_gpu():
        size = partial(size_micro_batches, run.with_row_tokens(train.tokens / train.rows), machines)
        planned = run.with_micro_batch_tokens(*state.from_rank_zero(size, doing="choosing the size of micro-batches"))
    if run.swaps_reference:
        place = partial(place_reference, planned, machines, longest=longest)
        planned = planned.with_reference_memory(*state.from_rank_zero(place, doing="placing the reference"))
    if state.is_rank_zero() and (warning := check_memory(planned, machines, longest=longest)):
        logger.warning(warning)
    return Placement.of(planned)
