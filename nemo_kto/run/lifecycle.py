"""Folder, record and end of a run: its lock, run.json, its export and page, and the exit of a stopped run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import megatron.core
import torch
import transformers

from nemo_kto import __version__
from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.checkpoint.manager import load_weights_only
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.saved_config import save_config, settings_of_user
from nemo_kto.config.schema import RunConfig
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, describe
from nemo_kto.huggingface.export_folder import check_target
from nemo_kto.huggingface.hf_weights import export_bytes
from nemo_kto.model_files.adapter_files import is_our_adapter
from nemo_kto.model_files.checkpoint_files import Checkpoint, best_of, find_checkpoints
from nemo_kto.model_files.safetensors_files import is_our_model
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
    RunRecord,
    begin_run,
    end_run,
    read_run,
    refuse_second_run,
)
from nemo_kto.redaction import redacted
from nemo_kto.run.data import RunData
from nemo_kto.run.policy import Policy, export_policy
from nemo_kto.run.prepare import Start
from nemo_kto.run.summary import end_table
from nemo_kto.telemetry.loggers import WarningsFile
from nemo_kto.utils.fields import read_object_as
from nemo_kto.utils.files import make_folder, remove_unpublished
from nemo_kto.utils.locks import locked
from nemo_kto.utils.text import print_error

logger = logging.getLogger(__name__)

# Writes the page about a run into a file, unless that is None, and returns the problems that it reports, the worst first.
ReportWriter = Callable[[RunRecord, Path | None], Sequence[str]]


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


def export_model(run: ResolvedRun, policy: Policy) -> Checkpoint | None:
    """Export the configured model, unless exports are disabled; return the best of the kept checkpoints. Collective."""
    export, ranking = run.cfg.export, run.cfg.exp_manager.checkpoint_callback_params
    kept = state.from_rank_zero(lambda: find_checkpoints(run.checkpoints))
    best = best_of(kept, monitor=ranking.monitor, mode=ranking.mode)
    if not export.enabled:
        return best
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
    return best


def finish(
    run: ResolvedRun,
    policy: Policy,
    trainer: DPOTrainer,
    *,
    best: Checkpoint | None,
    seconds: float,
    write_report: ReportWriter | None,
) -> None:
    """Record the end of a run, write its page and print its summary, on rank 0.

    ``best``: the best of the kept checkpoints; ``seconds``: time of training.
    """
    if state.is_rank_zero():
        record_end(run.folder, trainer)
        report, findings = make_report(run.folder, write_report, has_page=run.cfg.export.report)
        table = end_table(run, policy, trainer, best=best, report=report, findings=findings, seconds=seconds)
        print(f"\n{table}", flush=True)


def record_start(
    run: ResolvedRun, start: Start, *, summary: Mapping[str, str], trainer: DPOTrainer, warnings: WarningsFile
) -> None:
    """Write config.yaml, run.json and data.json, and open the file of warnings; on rank 0.

    ``summary`` is the table at the start of the run.
    """
    save_config(run.cfg)
    resumed_step = start.resumption.resumed_step
    reasons = {"trainer.precision": run.precision_reason, "model.data.seq_length": run.length_reason}
    chosen = [key for key, reason in reasons.items() if reason != "set by the user"]
    content = {
        "algorithm": run.cfg.recipe.name,
        "total_steps": trainer.max_steps,
        "date": start.data.date.strftime(DATE),
        "resumed_step": resumed_step,
        "settings": {key: value for key, value in settings_of_user(run.cfg).items() if key not in chosen},
        "summary": {label: redacted(text) for label, text in summary.items()},
        "facts": start.resumption.facts,
        "versions": {
            "nemo-kto": __version__,
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
            "transformers": transformers.__version__,
        },
    }
    begin_run(run.folder, run=content, data=data_statistics(run.cfg, start.data))
    warnings.open_file(run.folder, step=lambda: trainer.step, resumed_step=resumed_step)


def data_statistics(cfg: RunConfig, data: RunData) -> dict[str, Any]:
    """Return counts and lengths of the examples of each split, and numbers and loss weights of the training classes."""
    train = data.splits.train
    assert train is not None
    weights = cfg.loss.model_options(train)
    balance = {}
    if hasattr(train, "class_weights"):  # pairs have no classes
        balance = {
            "examples": train.class_weights,
            "weights": [weights[f"{name}_loss_weight"] for name in train.counts.classes],
        }
    return {
        "unit": cfg.recipe.unit,
        "seq_length": cfg.seq_length,
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
def recording_failure(folder: Path, trainer: DPOTrainer) -> Iterator[None]:
    """Record the end of a run that is stopped or fails within the block."""
    try:
        yield
    except Stopped:
        _end(folder, STOPPED, "" if trainer.stop is None else trainer.stop.text)
        raise
    except BaseException as error:
        _end(folder, FAILED, describe(error))
        raise


def record_end(folder: Path, trainer: DPOTrainer) -> None:
    """Record that a run has ended as it should, and why it did if it is not at its last step."""
    if trainer.step >= trainer.max_steps:
        _end(folder, FINISHED)
    elif trainer.stopped_early is not None:
        _end(folder, FINISHED, f"early stopping: {trainer.stopped_early}")
    else:
        _end(folder, STOPPED, "" if trainer.stop is None else trainer.stop.text)


def _end(folder: Path, word: str, text: str = "") -> None:
    if state.is_rank_zero():
        try:
            end_run(folder, word, text)
        except OSError as error:
            logger.warning("the end of the run could not be recorded in %s: %s", folder, error.strerror)


def end_finished_run(run: ResolvedRun, message: str, *, write_report: ReportWriter | None) -> None:
    """Print, on rank 0, that nothing is left to do; complete the record of a run that was killed before its end."""
    if state.is_rank_zero():
        complete_record(run.folder, write_report if run.cfg.export.report else None)
        print(f"nemo-kto: {message}", flush=True)


def complete_record(folder: Path, write_report: ReportWriter | None) -> None:
    """Record the end of a finished run, and write its report, if it was killed before it had done so."""
    record, report = folder / RUN_FILE, folder / REPORT_FILE
    if read_object_as(RunFile, record).get("state") in (RUNNING, FAILED):
        _end(folder, FINISHED)
    if not report.exists() or (record.exists() and report.stat().st_mtime_ns < record.stat().st_mtime_ns):
        make_report(folder, write_report)


def make_report(
    folder: Path, write_report: ReportWriter | None, *, has_page: bool = True
) -> tuple[Path | None, Sequence[str]]:
    """Write the report of a run into its folder, if it ``has_page``; return its path and the problems that it reports.

    Without a writer, or if it fails, they are None and empty. A run must not fail because of its report, so that any error
    is a warning.
    """
    if write_report is None:
        return None, ()
    out = folder / REPORT_FILE if has_page else None
    try:
        return out, write_report(read_run(folder), out)
    except Exception as error:  # matplotlib and jinja2 may raise anything
        text = "the report could not be written (%s: %s); `nemo-kto report %s` writes it later"
        logger.warning(text, type(error).__name__, error, folder)
        return None, ()
