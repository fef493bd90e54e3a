"""A run as its folder records it: settings, state, curves, histograms of rewards, samples, warnings, and its data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, Checkpoint, find_checkpoints
from nemo_kto.config.saved_config import CONFIG_FILE, read_saved
from nemo_kto.errors import UserError
from nemo_kto.report.curves import Curve, read_curves
from nemo_kto.telemetry.loggers import METRICS_FILE, parse_line
from nemo_kto.telemetry.rewards import REWARDS_FILE, RewardHistogram, read_rewards
from nemo_kto.telemetry.samples import SAMPLES_FILE, Sample, read_samples
from nemo_kto.telemetry.warnings_file import WARNINGS_FILE
from nemo_kto.utils.files import open_file, read_bytes, read_json_lines, read_lines
from nemo_kto.utils.locks import GONE_SECONDS, owner_file

# Files of a run folder.
RUN_FILE = "run.json"  # state, settings and versions of the run
DATA_FILE = "data.json"  # statistics of its data
REPORT_FILE = "report.html"  # written beside report.md
RUN_LOCK = ".lock"  # held by a run while it uses its folder

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
UNKNOWN = "ended"  # the run ended without a record of how
_MAX_WARNINGS = 10_000


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
    samples: list[Sample] = field(default_factory=list)
    warnings: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", self.run.get("algorithm", "")))

    @property
    def loss(self) -> str:
        """Name of the loss; that of the algorithm if the configuration was not saved."""
        return str(self.config.get(f"model.{self.algorithm}.preference_loss", self.algorithm))

    @property
    def beta(self) -> float | None:
        value = self.config.get(f"model.{self.algorithm}.ref_policy_kl_penalty")
        return float(value) if isinstance(value, int | float) else None

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

    @property
    def quality(self) -> tuple[str, str] | None:
        """Label and name of the metric that tells better from worse answers, AUC or accuracy; None without validations."""
        for prefix in self.validations.values():
            for label, name in (("AUC", f"{prefix}auc"), ("accuracy", f"{prefix}acc")):
                if name in self.curves:
                    return label, name
        return None

    @property
    def step(self) -> int:
        """Last step with a record."""
        curve = self.curves.get("train/loss")
        return max(0 if curve is None else curve.last_step, *(sample.step for sample in self.samples), 0)

    @property
    def total_steps(self) -> int | None:
        value = self.run.get("total_steps")
        return value if isinstance(value, int) else None

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
        known = self.run.get("settings")
        return {key: self.config.get(key, known[key]) for key in known} if isinstance(known, dict) else {}

    @property
    def summary(self) -> dict[str, str]:
        """The table that the run printed at its start, by label."""
        return {str(label): str(text) for label, text in self.run.get("summary", {}).items()}

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first; empty if they cannot be read."""
        try:
            return find_checkpoints(self.folder / CHECKPOINTS)
        except UserError:
            return []


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run, whether it has finished, is running or was killed.

    Raises UserError if there is no such folder, or none of the files of a run in it.
    """
    looked_for = (RUN_FILE, METRICS_FILE, CONFIG_FILE)
    if not folder.is_dir():
        raise UserError(f"RUN must be the folder of a run, got {folder}, which is not a folder; check the path")
    if not any((folder / name).is_file() for name in looked_for):
        inner = sorted(child.parent.name for child in folder.glob(f"*/{METRICS_FILE}"))
        remedy = f"perhaps one of the folders in it: {', '.join(inner[:5])}" if inner else "check the path"
        missing = ", ".join(looked_for[:-1]) + f" or {looked_for[-1]}"
        raise UserError(f"RUN must be the folder of a run, got {folder}, which has no {missing}; {remedy}")
    run = read_object(folder / RUN_FILE)
    return RunRecord(
        folder=folder,
        state=_state(folder, run),
        config=read_saved(folder / CONFIG_FILE),
        run=run,
        data=read_object(folder / DATA_FILE),
        curves=read_curves(_lines(folder / METRICS_FILE)),
        rewards=read_rewards(folder / REWARDS_FILE),
        samples=read_samples(folder / SAMPLES_FILE),
        warnings=list(islice(read_json_lines(folder / WARNINGS_FILE), _MAX_WARNINGS)),
    )


def _state(folder: Path, run: Mapping[str, Any]) -> State:
    """Return the state of a run: one that recorded no end is running if the owner of its lock gives signs of life."""
    word, text = str(run.get("state")), str(run.get("text") or "")
    if word not in (RUNNING, FINISHED, STOPPED, FAILED):
        word = UNKNOWN
    if word not in (RUNNING, UNKNOWN):
        return State(word, text)
    try:
        lives = time.time() - owner_file(folder / RUN_LOCK).stat().st_mtime < GONE_SECONDS
    except OSError:
        lives = False
    if lives:
        return State(RUNNING)
    killed = "without a message: it was killed, or its machine went down"
    return State(UNKNOWN, killed if word == RUNNING else "")


def _lines(file: Path) -> Iterator[Mapping[str, float]]:
    if file.is_file():
        with open_file(file) as lines:
            yield from filter(None, map(parse_line, read_lines(lines)))


def read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bytes(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
