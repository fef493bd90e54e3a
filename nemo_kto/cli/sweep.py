"""Report of a sweep, which Hydra calls: a list of all jobs before the first one, and their results after the last one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from nemo_kto.cli import aligned
from nemo_kto.data.rows.sources import validation_names
from nemo_kto.errors import plural
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.telemetry.loggers import METRICS_FILE, read_metrics
from nemo_kto.utils.text import redacted

_METRICS = ("loss", "acc", "auc", "rewards_margin")


class SweepReport(Callback):
    """Prints the jobs of a sweep with Hydra's own sweeper; other sweepers choose values while the sweep runs."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Print the number of each job and its values."""
        if jobs := _jobs(config):
            rows = [["job", *jobs[0]], *([str(number), *values.values()] for number, values in enumerate(jobs))]
            title = f"nemo-kto {config.algorithm}: a sweep of {plural(len(jobs), 'job')}"
            print(title, *aligned(rows, indent="  "), sep="\n", flush=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the values of each job, the results of its last validation, and its run folder."""
        if not (jobs := _jobs(config)):
            return
        results = [_last_validation(_folder(config, number) / METRICS_FILE) for number in range(len(jobs))]
        prefix = OmegaConf.to_container(OmegaConf.create({"value": config.model.data.get("data_prefix")}))
        sets = validation_names(prefix["value"] if isinstance(prefix, dict) else None)
        names = [f"val/{metric_prefix(name)}{metric}" for name in sets for metric in _METRICS]
        names = [name for name in names if any(name in result for result in results)]
        rows = [["job", *jobs[0], *(name.replace("/", "_") for name in names), "run folder"]]
        for number, (values, result) in enumerate(zip(jobs, results, strict=True)):
            shown = [f"{result[name]:.4f}" if name in result else "-" for name in names]
            rows.append([str(number), *values.values(), *shown, str(_folder(config, number))])
        title = f"\nnemo-kto {config.algorithm}: results of {plural(len(jobs), 'job')}"
        print(title, *aligned(rows, indent="  "), sep="\n", flush=True)


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


def _last_validation(metrics_file: Path) -> dict[str, float]:
    """Return the last value of each metric in a metrics.jsonl; empty if there is none."""
    last: dict[str, float] = {}
    for logged in read_metrics(metrics_file):
        last |= {name: value for name, value in logged.items() if value is not None}
    return last
