"""Start and end of a job: lock of its folder, precision, export, exit of a stopped run, and the records of its report."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import megatron.core
import torch
import transformers

from nemo_kto import __version__
from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.artifacts.adapter_files import is_our_adapter
from nemo_kto.artifacts.checkpoint_files import best_of, find_checkpoints
from nemo_kto.artifacts.hub import is_hub_name, pin
from nemo_kto.artifacts.safetensors_files import is_our_model
from nemo_kto.checkpoint.manager import checkpoint_dtype, load_weights_only
from nemo_kto.config.resolved import MODEL_KEYS, ResolvedRun, value_of, with_value
from nemo_kto.config.saved_config import settings_of_user
from nemo_kto.device.precision import FORCED, MAX_SLOWDOWN, PRECISIONS, bf16_support, dtype_of
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, describe, redacted
from nemo_kto.huggingface.folders import check_target
from nemo_kto.huggingface.hf_weights import export_bytes
from nemo_kto.processes.ranks import requeue
from nemo_kto.processes.signals import Stopped
from nemo_kto.records.run_record import (
    ANOTHER_FOLDER,
    DATE,
    FAILED,
    FINISHED,
    REPORT_FILE,
    RUN_FILE,
    RUN_LOCK,
    RUNNING,
    STOPPED,
    RunFile,
    begin_run,
    end_run,
    read_run,
    refuse_second_run,
)
from nemo_kto.run.data import RunData
from nemo_kto.run.policy import Policy, export_policy
from nemo_kto.run.resume import Resumption
from nemo_kto.run.summary import end_table
from nemo_kto.utils.files import make_folder, remove_unpublished
from nemo_kto.utils.locks import locked
from nemo_kto.utils.saved_records import read_object_as
from nemo_kto.utils.text import print_error

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run folder during the block, so that no other job uses it; collective, rank 0 holds the lock.

    The folder is created if it does not exist, and removed at the end if nothing was written into it. All ranks raise
    UserError if another job is using the folder, or it cannot be written.
    """
    with contextlib.ExitStack() as lock:
        state.from_rank_zero(lambda: lock.enter_context(_locked(folder)), doing="taking the lock of the run folder")
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    absent = [each for each in (folder, *folder.parents) if not each.exists()]

    with contextlib.ExitStack() as lock:
        try:
            make_folder(folder, private=False)
            lock.enter_context(locked(folder / RUN_LOCK, when_held=partial(refuse_second_run, folder)))
            remove_unpublished(folder)
        except OSError as error:
            raise UserError(f"{folder} must be a folder that can be written: {error.strerror}; {ANOTHER_FOLDER}") from error
        try:
            yield
        finally:
            lock.close()
            with contextlib.suppress(OSError):  # a folder is not empty, because something was written into it
                for each in absent:
                    each.rmdir()


def agree_on_models(run: ResolvedRun) -> ResolvedRun:
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


def resolve_precision(run: ResolvedRun) -> ResolvedRun:
    """Replace trainer.precision=auto by bf16 or 32; collective.

    Rank 0 decides for all ranks: a resumed run keeps the precision of its newest checkpoint; a new run uses bf16 if the
    machine computes faster with it. All raise UserError for bf16 on a CPU that is too slow with it, unless it is forced.
    """
    return run.with_precision(*state.from_rank_zero(lambda: _choose_precision(run), doing="choosing the precision"))


def _choose_precision(run: ResolvedRun) -> tuple[str, str]:
    """Return the precision and its reason: that of the newest checkpoint, or bf16 if the machine computes faster with it."""
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


def stop_early(run: ResolvedRun, trainer: DPOTrainer) -> NoReturn:
    """End a run early, after its last checkpoint is complete, by raising Stopped; collective."""
    reason = "" if trainer.stop is None else trainer.stop.text
    where = f"at step {trainer.step} of {trainer.max_steps}, checkpoint {name_of_newest(run.checkpoints)}"
    where = where if trainer.step else "before the first step, with nothing to save"
    stop_run(f"stopped by {reason} {where}", requeues=run.cfg.trainer.requeue)


def stop_run(text: str, *, requeues: bool) -> NoReturn:
    """End the run by raising Stopped, and print how it is resumed; collective.

    ``text`` is the reason for its end; with ``requeues``, its SLURM job is requeued.
    """
    if state.is_rank_zero():
        job = requeue(os.environ) if requeues else None
        how = "start the same command again to resume" if job is None else f"SLURM job {job} was requeued to resume"
        print_error(f"nemo-kto: {text}; {how}")
    state.max_over_ranks(0)  # wait for rank 0, which is still busy: the exit of one rank may terminate the others
    raise Stopped


def name_of_newest(folder: Path) -> str:
    """Return the path of the newest complete checkpoint in the folder of a run's checkpoints, or "none"."""
    checkpoints = find_checkpoints(folder)
    return str(checkpoints[-1].folder) if checkpoints else "none"


def check_export(run: ResolvedRun) -> None:
    """Raise UserError before training if an export folder cannot be written or has too little free space; collective."""
    export = run.cfg.export
    if not export.enabled:
        return

    def check() -> None:
        need = export_bytes(run.architecture, run.dtype, run.files.original)
        targets = [("export.path", export.path, is_our_model, need)]
        if run.has_adapters:
            targets.append(("export.adapter_path", export.adapter_path, is_our_adapter, 0))  # adapters are small
        for key, path, is_ours, need in targets:
            try:
                check_target(Path(path), is_ours=is_ours, need=need)
            except UserError as error:
                raise UserError(f"{key} cannot be used: {error}, or set export.enabled=false") from error

    state.on_rank_zero(check, "{}")


def finish(run: ResolvedRun, policy: Policy, trainer: DPOTrainer, *, seconds: float) -> None:
    """Export the configured model and print the summary of the run; collective. ``seconds``: time of training."""
    export, ranking = run.cfg.export, run.cfg.exp_manager.checkpoint_callback_params
    kept = state.from_rank_zero(lambda: find_checkpoints(run.checkpoints))
    best = best_of(kept, monitor=ranking.monitor, mode=ranking.mode)
    if export.enabled:
        exported = kept[-1] if kept else None
        if export.which == "best" and best is not None:
            exported = best
            load_weights_only(best.folder, policy.chunks)
        elif export.which == "best" and state.is_rank_zero():
            text = "no checkpoint has %s, so there is no best one; the model after the last step is exported"
            logger.warning(text, ranking.monitor)
        later = f"the checkpoints are complete: `nemo-kto export {run.folder} OUT` writes the model later"
        try:
            export_policy(
                policy,
                out=Path(export.path),
                adapter_out=Path(export.adapter_path),
                info={} if exported is None else exported.info,
                run_folder=run.folder,
                max_shard_size_gb=export.max_shard_size_gb,
            )
        except UserError as error:
            raise UserError(f"{error}; {later}") from error
        except RuntimeError as error:
            raise RuntimeError(f"{error}; {later}") from error
    record_end(run, trainer)
    if state.is_rank_zero():
        report = make_report(run)
        print(f"\n{end_table(run, policy, trainer, best=best, report=report, seconds=seconds)}", flush=True)


def record_start(
    run: ResolvedRun, data: RunData, resumption: Resumption, *, summary: Mapping[str, str], total_steps: int
) -> None:
    """Write run.json and data.json; ``summary`` is the table at the start of the run."""
    reasons = {"trainer.precision": run.precision_reason, "model.data.seq_length": run.length_reason}
    chosen = [key for key, reason in reasons.items() if reason != "set by the user"]
    content = {
        "algorithm": run.cfg.recipe.name,
        "total_steps": total_steps,
        "date": data.date.strftime(DATE),
        "resumed_step": resumption.resumed_step,
        "settings": {key: value for key, value in settings_of_user(run.cfg).items() if key not in chosen},
        "summary": {label: redacted(text) for label, text in summary.items()},
        "facts": resumption.facts,
        "versions": {
            "nemo-kto": __version__,
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
            "transformers": transformers.__version__,
        },
    }
    begin_run(run.folder, run=content, data=data_statistics(run, data))


def data_statistics(run: ResolvedRun, data: RunData) -> dict[str, Any]:
    """Return counts and lengths of the examples of each split, and numbers and loss weights of the training classes."""
    train = data.splits.train
    assert train is not None
    weights = run.cfg.recipe.model_options(run.cfg.loss, train)
    balance = {}
    if hasattr(train, "class_weights"):  # pairs have no classes
        balance = {
            "examples": train.class_weights,
            "weights": [weights[f"{name}_loss_weight"] for name in train.counts.classes],
        }
    return {
        "unit": run.cfg.recipe.unit,
        "seq_length": run.cfg.seq_length,
        "balance": balance,
        "sets": {
            name: {
                **asdict(examples.counts),
                "lengths": {part: asdict(each) for part, each in examples.length_histograms().items()},
            }
            for name, examples in data.splits.in_use.items()
        },
    }


@contextlib.contextmanager
def record_failure(run: ResolvedRun, trainer: DPOTrainer) -> Iterator[None]:
    """Record the end of a run that is stopped or fails within the block."""
    try:
        yield
    except Stopped:
        _end(run, STOPPED, "" if trainer.stop is None else trainer.stop.text)
        raise
    except BaseException as error:
        _end(run, FAILED, describe(error))
        raise


def record_end(run: ResolvedRun, trainer: DPOTrainer) -> None:
    """Record that a run has ended as it should, and why it did if it is not at its last step."""
    if trainer.step >= trainer.max_steps:
        _end(run, FINISHED)
    elif trainer.stopped_early is not None:
        _end(run, FINISHED, f"early stopping: {trainer.stopped_early}")
    else:
        _end(run, STOPPED, "" if trainer.stop is None else trainer.stop.text)


def _end(run: ResolvedRun, word: str, text: str = "") -> None:
    if state.is_rank_zero():
        try:
            end_run(run.folder, word, text)
        except OSError as error:
            logger.warning("the end of the run could not be recorded in %s: %s", run.folder, error.strerror)


def complete_record(run: ResolvedRun) -> None:
    """Record the end of a finished run, and write its report, if it was killed before it had done so."""
    record, report = run.folder / RUN_FILE, run.folder / REPORT_FILE
    if read_object_as(RunFile, record).get("state") in (RUNNING, FAILED):
        _end(run, FINISHED)
    if not report.exists() or (record.exists() and report.stat().st_mtime_ns < record.stat().st_mtime_ns):
        make_report(run)


def make_report(run: ResolvedRun) -> Path | None:
    """Write the report of a run into its folder and return its path; None if it is disabled or could not be written.

    A run must not fail because of its report, so that any error is a warning.
    """
    if not run.cfg.export.report:
        return None
    try:
        from nemo_kto.tools.report.report_page import write_report

        write_report([read_run(run.folder)], out := run.folder / REPORT_FILE)
        return out
    except Exception as error:  # matplotlib and jinja2 may raise anything
        text = "the report could not be written (%s: %s); `nemo-kto report %s` writes it later"
        logger.warning(text, type(error).__name__, error, run.folder)
        return None
