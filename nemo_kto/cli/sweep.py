"""Report of a sweep, which Hydra calls: a list of all jobs before the first one, and their results after the last one."""

from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from nemo_kto.data.rows.data_sources import validation_names
from nemo_kto.errors import UserError, plural
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.records.curves import Curve
from nemo_kto.records.run_record import FAILED, RunRecord, read_run
from nemo_kto.redaction import redacted
from nemo_kto.utils.text import aligned

_METRICS = ("loss", "acc", "auc", "rewards_margin")


class SweepReport(Callback):
    """Prints the jobs of a sweep with Hydra's own sweeper; other sweepers choose values while the sweep runs."""

    def __init__(self) -> None:
        self._failed = set[int]()  # numbers of jobs

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Print the number of each job and its values."""
        if jobs := _jobs(config):
            rows = [["job", *jobs[0]], *([str(number), *values.values()] for number, values in enumerate(jobs))]
            title = f"nemo-kto {config.algorithm}: a sweep of {plural(len(jobs), 'job')}"
            print(title, *aligned(rows, indent="  "), sep="\n", flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Note a job that failed: its exit status is not 0."""
        if job_return.status is not JobStatus.COMPLETED or job_return.return_value:
            self._failed.add(config.hydra.job.num)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print values, state, validation results and run folder of each job, and the command that compares the runs.

        The best job is the one with the best value of the metric that ranks checkpoints, at any validation after step 0.
        """
        if not (jobs := _jobs(config)):
            return
        folders = [_folder(config, number) for number in range(len(jobs))]
        runs = [_read(folder) for folder in folders]
        curves = [{} if run is None else run.curves for run in runs]
        states = ["-" if run is None else run.state.word for run in runs]
        states = [FAILED if number in self._failed else state for number, state in enumerate(states)]
        ranking = config.exp_manager.checkpoint_callback_params
        monitored, is_max = ranking.monitor.replace("_", "/", 1), ranking.mode == "max"
        bests = [_best(each.get(monitored), is_max=is_max) for each in curves]
        ranked = sorted((value, number) for number, value in enumerate(bests) if value is not None)
        winner = ranked[-is_max][1] if ranked else None
        prefix = OmegaConf.to_container(OmegaConf.create({"value": config.model.data.get("data_prefix")}))
        sets = validation_names(prefix["value"] if isinstance(prefix, dict) else None)
        others = [f"val/{metric_prefix(name)}{metric}" for name in sets for metric in _METRICS]
        others = [name for name in others if name != monitored and any(name in each for each in curves)]
        columns = [ranking.monitor, f"best {ranking.monitor}", *(name.replace("/", "_") for name in others)]
        rows = [["job", *jobs[0], "state", *columns, "run folder"]]
        for number, values in enumerate(jobs):
            last = [curves[number][name].last if name in curves[number] else None for name in (monitored, *others)]
            figures = ["-" if value is None else f"{value:.4f}" for value in (last[0], bests[number], *last[1:])]
            mark = " *" if number == winner else ""
            rows.append([f"{number}{mark}", *values.values(), states[number], *figures, str(folders[number])])
        lines = [f"\nnemo-kto {config.algorithm}: results of {plural(len(jobs), 'job')}", *aligned(rows, indent="  ")]
        lines += [f"  * the best {ranking.monitor}"] if ranked else []
        if begun := [str(folder) for folder, run in zip(folders, runs, strict=True) if run is not None]:
            lines.append(f"compare them: {shlex.join(['nemo-kto', 'report', *begun])}")
        print(*lines, sep="\n", flush=True)


def _jobs(config: DictConfig) -> list[dict[str, str]]:
    """Return the swept keys and their values of each job, in Hydra's order.

    Empty if no key is swept, for other sweepers, and on ranks above 0.
    """
    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper") or os.environ.get("RANK", "0") != "0":
        return []
    texts = [f"{key}={value}" for key, value in (sweeper.params or {}).items()] + list(config.hydra.overrides.task)
    values = {}
    for override in OverridesParser.create().parse_overrides(texts):
        if override.is_sweep_override():
            values[override.key_or_group] = [redacted(str(value)) for value in override.sweep_string_iterator()]
        else:
            values.pop(override.key_or_group, None)
    return [dict(zip(values, job, strict=True)) for job in itertools.product(*values.values())] if values else []


def _folder(config: DictConfig, number: int) -> Path:
    job = config.copy()
    with open_dict(job):
        job.hydra.job.num = number
    return Path(job.hydra.sweep.dir) / str(job.hydra.sweep.subdir)


def _read(folder: Path) -> RunRecord | None:
    """Return the run of a folder; None if none has begun in it."""
    try:
        return read_run(folder)
    except UserError:
        return None


def _best(curve: Curve | None, *, is_max: bool) -> float | None:
    """Return the best value of a curve after step 0; None if there is none."""
    return None if curve is None or curve.last_step == 0 else curve.at(curve.steps > 0).extremes[is_max]
