"""A run as its folder records it: settings, state, curves, histograms of rewards, samples, warnings, and its data.

The state is in run.json, which is written at the start and at the end of a run.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import numpy as np
from annotated_types import Ge, Gt, Le, Len, Lt

from nemo_kto.config.checker import POSITIONS, override_value
from nemo_kto.config.saved_config import CONFIG_FILE, read_saved
from nemo_kto.errors import UserError, either
from nemo_kto.model_files.checkpoint_files import CHECKPOINTS, Checkpoint, find_checkpoints
from nemo_kto.records.curves import Curve, read_curves
from nemo_kto.redaction import HIDDEN
from nemo_kto.telemetry.evaluations import (
    EXTREMES_FILE,
    REWARDS_FILE,
    SAMPLES_FILE,
    ExtremeRow,
    RewardHistogram,
    Sample,
    read_rewards,
    read_samples,
)
from nemo_kto.telemetry.loggers import METRICS_FILE, WARNINGS_FILE, LoggedWarning, read_metrics, read_warnings
from nemo_kto.utils.fields import Count, Number, Record, read_lines_as, read_object_as
from nemo_kto.utils.files import publish_file
from nemo_kto.utils.intervals import auc_interval, has_enough_rows
from nemo_kto.utils.locks import certain_holder, last_holder, one_writer
from nemo_kto.utils.text import mixture_name, terminal_text

# Files of a run folder.
RUN_FILE = "run.json"  # state, settings and versions of the run
DATA_FILE = "data.json"  # statistics of its data
COMPARISONS_FILE = "comparisons.jsonl"  # results of nemo-kto compare
REPORT_FILE = "report.html"
RUN_LOCK = ".lock"  # held by a run while it uses its folder
_OF_EVERY_RUN = (RUN_FILE, METRICS_FILE, CONFIG_FILE)  # at least one of them

RUNNING, FINISHED, STOPPED, FAILED, KILLED = "running", "finished", "stopped", "failed", "killed"
UNKNOWN = "ended"  # the run ended without a record of how
DATE = "%Y-%m-%d"
ANOTHER_FOLDER = "choose another folder with exp_manager.name or exp_manager.explicit_log_dir"
_MAX_TEXT = 10_000  # characters of an error
_Share = Annotated[float, Ge(0), Le(1)]


class RunFile(Record):
    """Content of run.json."""

    state: str = ""
    text: str = ""
    started: Number = 0.0
    date: str = ""  # of the first start, in the form 2026-11-26
    algorithm: str = ""
    total_steps: Count | None = None
    settings: Mapping[str, Any] = {}
    summary: Mapping[str, str] = {}
    versions: Mapping[str, str] = {}
    facts: Mapping[str, Any] = {}


class _Lengths(Record):
    width: Annotated[int, Gt(0), Lt(2**31)]
    counts: Annotated[list[Count], Len(0, 10_000)]
    last_is_open: bool = False


class _Set(Record):
    rows: Count
    tokens: Count
    longest: Count
    cut_prompts: Count
    cut_responses: Count
    desirable: Count | None = None
    lengths: Mapping[str, _Lengths] = {}


class _Balance(Record):
    examples: Sequence[Number] = []
    weights: Sequence[Number] = []


class _DataFile(Record):
    """Content of data.json."""

    unit: str = ""
    seq_length: Count | None = None
    balance: _Balance = _Balance()
    sets: Mapping[str, _Set] = {}


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """Result of a comparison of the run's model with another one; a line of comparisons.jsonl."""

    base: str  # the other model
    by: str  # what decided
    wins: Count
    ties: Count
    losses: Count
    rate: _Share  # with half of the ties
    interval: tuple[_Share, _Share]  # of 95 %
    length_controlled: _Share  # the rate that answers of equal length would have
    mean_lengths: tuple[Number, Number]  # characters of the answers of the model, and of the other one


class State(NamedTuple):
    """State of a run: one of the words above, and a text with the reason, which may be empty."""

    word: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as the files of its folder are now; what a file lacks is empty."""

    folder: Path
    state: State
    config: Mapping[str, object]  # value of each key
    run: Mapping[str, Any]  # content of run.json
    data: Mapping[str, Any]  # content of data.json
    curves: Mapping[str, Curve]  # of each metric, by its name: train/loss, val/loss, ...
    rewards: Mapping[str, Mapping[int, RewardHistogram]]  # name of the validation set -> step -> histogram
    extremes: list[ExtremeRow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    comparisons: list[ComparisonResult] = field(default_factory=list)
    warnings: list[LoggedWarning] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # what was left out of these, because it is not as a run writes it

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", self.run.get("algorithm", "")))

    @property
    def loss(self) -> str:
        """Name of the loss; that of the algorithm if the configuration was not saved."""
        section = f"model.{self.algorithm}"
        mixed = self.config.get(f"{section}.preference_losses")
        return (
            mixture_name(mixed)
            if isinstance(mixed, Mapping)
            else str(self.config.get(f"{section}.preference_loss", self.algorithm))
        )

    @property
    def beta(self) -> float | None:
        value = self.config.get(f"model.{self.algorithm}.ref_policy_kl_penalty")
        return float(value) if isinstance(value, int | float) and abs(value) < 1e100 else None

    @property
    def has_pairs(self) -> bool:
        """Whether the data are pairs of answers, not single answers with labels."""
        return any(name.endswith(("/acc", "_acc")) for name in self.curves)

    @property
    def classes(self) -> tuple[str, str]:
        """Names of the better and the worse answers; their metrics are named after the former names of pairs."""
        return ("chosen", "rejected") if self.has_pairs else ("desirable", "undesirable")

    @cached_property
    def validations(self) -> dict[str, str]:
        """Title of each validation set -> prefix of its metrics."""
        prefixes = [name.removesuffix("rows") for name in self.curves if name.startswith("val/") and name.endswith("rows")]
        prefixes = [prefix for prefix in prefixes if f"{prefix}loss" in self.curves]
        if not prefixes:
            prefixes = ["val/"] if "val/loss" in self.curves else []
        return {f"validation {prefix.removeprefix('val/').rstrip('_')}".strip(): prefix for prefix in prefixes}

    def is_small(self, prefix: str) -> bool:
        """Return whether a validation, given by the prefix of its metrics, has too few rows to judge the model by."""
        rows = self.curves.get(f"{prefix}rows")
        return prefix.startswith("val/") and not has_enough_rows(None if rows is None else rows.last)

    def auc_interval(self, prefix: str) -> tuple[float, float] | None:
        """Return the interval of 95 % of the last AUC of a validation; None if its AUC or classes are not recorded."""
        auc, rows = (
            None if curve is None else curve.last for curve in map(self.curves.get, (f"{prefix}auc", f"{prefix}rows"))
        )
        return recorded_interval(self.data, prefix.removeprefix("val/").removesuffix("_"), auc=auc, rows=rows)

    @property
    def step(self) -> int:
        """Last step with a record."""
        curve = self.curves.get("train/loss")
        return max(0 if curve is None else curve.last_step, *(sample.step for sample in self.samples), 0)

    @property
    def total_steps(self) -> int | None:
        return self.run.get("total_steps")

    @cached_property
    def seconds(self) -> float:
        """Time of training, validation, samples and waiting for checkpoints, over all starts of the run."""
        total = 0.0
        if (times := self.curves.get("timing/step_time")) is not None:
            total += float((times.values * times.steps_of_lines).sum())
        for name in ("timing/validation", "timing/samples", "timing/checkpoint_stall"):
            if name in self.curves:
                total += float(self.curves[name].values.sum())
        return total

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all steps divided by the time of these steps; None if it was not logged."""
        speed, times = self.curves.get("perf/tokens_per_sec"), self.curves.get("timing/step_time")
        if speed is None or times is None or not np.array_equal(speed.steps, times.steps):
            return None
        seconds = times.values * times.steps_of_lines
        return float((speed.values * seconds).sum() / seconds.sum()) if seconds.any() else None

    @property
    def settings(self) -> dict[str, object]:
        """Keys that the user set, with their values; empty if they are not known."""
        return {key: self.config.get(key, value) for key, value in self.run.get("settings", {}).items()}

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first; empty if they cannot be read."""
        try:
            return find_checkpoints(self.folder / CHECKPOINTS)
        except UserError:
            return []


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return any((folder / name).is_file() for name in _OF_EVERY_RUN)


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run, whether it has finished, is running or was killed.

    Raises UserError if there is no such folder, or none of the files of a run in it.
    """
    if not folder.is_dir():
        raise UserError(f"RUN must be the folder of a run, got {folder}, which is not a folder; check the path")
    if not is_run(folder):
        inner = sorted(child.parent.name for child in folder.glob(f"*/{METRICS_FILE}"))
        remedy = f"perhaps one of the folders in it: {', '.join(inner[:5])}" if inner else "check the path"
        raise UserError(f"RUN must be the folder of a run, got {folder}, which has no {either(_OF_EVERY_RUN)}; {remedy}")
    damaged: list[str] = []
    run, config = read_object_as(RunFile, folder / RUN_FILE, damaged), read_saved(folder / CONFIG_FILE)
    if not config and (folder / CONFIG_FILE).exists():
        damaged.append(f"{CONFIG_FILE}, which is not a configuration")
    return RunRecord(
        folder=folder,
        state=_state(folder, run),
        config=config,
        run=run,
        data=read_object_as(_DataFile, folder / DATA_FILE, damaged),
        curves=read_curves(read_metrics(folder / METRICS_FILE, damaged)),
        rewards=read_rewards(folder / REWARDS_FILE, damaged),
        extremes=list(read_lines_as(ExtremeRow, folder / EXTREMES_FILE, damaged)),
        samples=read_samples(folder / SAMPLES_FILE, damaged),
        comparisons=list(read_lines_as(ComparisonResult, folder / COMPARISONS_FILE, damaged)),
        warnings=read_warnings(folder / WARNINGS_FILE, damaged),
        damaged=damaged,
    )


def _state(folder: Path, run: Mapping[str, Any]) -> State:
    """Return the state of a run: one that recorded no end is running if the owner of its lock gives signs of life."""
    word, text = run.get("state"), run.get("text", "")
    if word in (FINISHED, STOPPED, FAILED):
        return State(word, text)
    holder = last_holder(folder / RUN_LOCK)
    if holder is not None and holder[1]:
        return State(RUNNING)
    if word != RUNNING:
        return State(UNKNOWN)
    who = "the run" if holder is None else str(holder[0])
    return State(KILLED, f"{who} was killed, or its machine went down; {_resuming(run)} resumes it")


def _resuming(run: Mapping[str, Any]) -> str:
    """Return the command that resumes a run, from the settings that it recorded, or words for it."""
    given = dict(run.get("settings", {}))
    settings = {key: override_value(value) for key, value in given.items()}
    if not run.get("algorithm") or not settings or any(HIDDEN in value for value in settings.values()):
        return "the same command"
    words = [given[key] if isinstance(given[key], str) else settings[key] for key in POSITIONS.values() if key in given]
    settings = {key: value for key, value in settings.items() if key not in POSITIONS.values()}
    return shlex.join(["nemo-kto", str(run["algorithm"]), *words, *(f"{key}={value}" for key, value in settings.items())])


def refuse_second_run(folder: Path, who: object) -> NoReturn:
    """Raise UserError, because ``who`` uses the folder of the run."""
    text = f"{folder} must be used by one run at a time, but {who} uses it"
    raise UserError(f"{text}; wait until it has ended, or {ANOTHER_FOLDER}")


def check_not_in_use(folder: Path) -> None:
    """Raise UserError if a run of this machine certainly uses the folder; in other cases the lock decides, later."""
    if (owner := certain_holder(folder / RUN_LOCK)) is not None:
        refuse_second_run(folder, owner)


def begin_run(folder: Path, *, run: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Record that a run has begun or was resumed, what it is (``run``), and the statistics of its data."""
    _write(folder / DATA_FILE, data)
    _write(folder / RUN_FILE, {"state": RUNNING, "text": "", "started": time.time(), **run})


def end_run(folder: Path, state: str, text: str = "") -> None:
    """Record the end of a run that :func:`begin_run` recorded: its state, and why it ended; without it, do nothing."""
    if run := read_object_as(RunFile, folder / RUN_FILE):
        text = terminal_text(text[-_MAX_TEXT:])  # without lone surrogates, which no reader of JSON accepts
        _write(folder / RUN_FILE, {**run, "state": state, "text": text, "ended": time.time()})


def record_comparison(folder: Path, compared: ComparisonResult) -> None:
    """Record the result of a comparison, instead of an earlier one with the same model by the same means."""
    file, key = folder / COMPARISONS_FILE, (compared.base, compared.by)
    with one_writer(file, private=False):
        kept = [each for each in read_lines_as(ComparisonResult, file) if (each.base, each.by) != key]
        with publish_file(file) as writing:
            writing.write_text("".join(json.dumps(asdict(each)) + "\n" for each in [*kept, compared]), encoding="utf-8")


def read_data(folder: Path) -> Mapping[str, Any]:
    """Return the statistics of a run's data; empty if it recorded none."""
    return read_object_as(_DataFile, folder / DATA_FILE)


def recorded_interval(
    data: Mapping[str, Any], name: str, *, auc: float | None, rows: float | None
) -> tuple[float, float] | None:
    """Return the interval of 95 % of an AUC on ``rows`` of a validation set; None if its classes are not in ``data``."""
    counts = data.get("sets", {}).get(f"validation.{name}" if name else "validation", {})
    if auc is None or rows is None or not counts.get("rows") or counts.get("desirable") is None:
        return None
    desirable = round(rows * counts["desirable"] / counts["rows"])  # not all rows if limit_val_batches is set
    undesirable = round(rows) - desirable
    return auc_interval(auc, desirable, undesirable) if desirable > 0 and undesirable > 0 else None


def first_date(folder: Path) -> datetime:
    """Return the day on which the run of a folder was first started; today for a new run."""
    try:
        return datetime.strptime(str(read_object_as(RunFile, folder / RUN_FILE).get("date")), DATE)
    except ValueError:
        return datetime.now()


def record_failure(folder: Path, text: str, *, since: float) -> None:
    """Record the error of the rank that failed first, if a run began in the folder after ``since``, in seconds since 1970.

    Rank 0 may have been ended before it could, or recorded that it missed the rank that failed.
    """
    run = read_object_as(RunFile, folder / RUN_FILE)
    if run.get("state") in (RUNNING, FAILED) and run.get("started", 0.0) >= since:
        end_run(folder, FAILED, text)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    with publish_file(file) as writing:
        writing.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
