"""Records in the run folder for a report: settings and state of the run, statistics of its data, and the report itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megatron.core
import torch
import transformers

from nemo_kto import __version__
from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.saved_config import settings_of_user
from nemo_kto.distributed import state
from nemo_kto.processes.signals import Stopped
from nemo_kto.report.record import (
    FAILED,
    FINISHED,
    REPORT_FILE,
    RUN_FILE,
    RUNNING,
    STOPPED,
    RunFile,
    begin_run,
    end_run,
    read_run,
)
from nemo_kto.run.data import RunData
from nemo_kto.run.resume import Resumption
from nemo_kto.utils.redaction import redacted
from nemo_kto.utils.saved_records import read_object_as

logger = logging.getLogger(__name__)


def record_start(
    run: ResolvedRun, data: RunData, resumption: Resumption, *, summary: Mapping[str, str], total_steps: int
) -> None:
    """Write run.json and data.json; ``summary`` is the table at the start of the run."""
    reasons = {"trainer.precision": run.precision_reason, "model.data.seq_length": run.length_reason}
    chosen = {key for key, reason in reasons.items() if reason != "set by the user"}
    content = {
        "algorithm": run.cfg.recipe.name,
        "total_steps": total_steps,
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
        _end(run, FAILED, redacted(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__))
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
    record, report = run.folder / RUN_FILE, run.folder / REPORT_FILE.replace(".html", ".md")  # the last file of a report
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
        from nemo_kto.report.page import write_report

        return write_report([read_run(run.folder)], run.folder / REPORT_FILE)[0]
    except Exception as error:  # matplotlib and jinja2 may raise anything
        text = "the report could not be written (%s: %s); `nemo-kto report %s` writes it later"
        logger.warning(text, type(error).__name__, error, run.folder)
        return None
