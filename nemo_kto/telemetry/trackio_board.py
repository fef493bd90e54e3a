"""trackio: a dashboard of this machine with metrics, samples, histograms of rewards, and alerts."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_kto.errors import describe
from nemo_kto.redaction import redacted
from nemo_kto.telemetry.evaluations import COLUMNS, RewardHistogram, Sample, cells

_MAX_TITLE = 80  # characters, which the list of alerts shows
_RISES = 2  # consecutive validations with a higher loss that raise an alert


class TrackioBoard(logging.Handler):
    """A run of trackio. The warnings of the training are alerts, as are a rising validation loss and the end of the run."""

    def __init__(
        self, *, trackio: Any, project: str, name: str, resumed: bool, val_prefixes: Sequence[str] = ("val/",)
    ) -> None:
        """Open the run ``name`` in the folder TRACKIO_DIR; nothing is sent elsewhere unless trackio's variables say so."""
        super().__init__(logging.WARNING)
        self._trackio, self._val_prefixes = trackio, val_prefixes
        self._step, self._losses, self._seen = 0, dict[str, list[float]](), set[str]()
        # trackio would ask the Hugging Face hub for the name of the user
        trackio.run._get_default_namespace = lambda: None
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=project, name=name, resume="allow" if resumed else "never", embed=False, auto_log_cpu=False
            )
        logging.root.addHandler(self)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)
        for key in [f"{prefix}loss" for prefix in self._val_prefixes if f"{prefix}loss" in metrics]:
            losses = self._losses.setdefault(key, [])
            losses.append(metrics[key])
            last = losses[-_RISES - 1 :]
            if len(last) > _RISES and last == sorted(set(last)):
                self._alert(f"{key} rises", " -> ".join(f"{loss:.4g}" for loss in last), "WARN")
                del losses[:-1]

    def log_rewards(self, histograms: Sequence[RewardHistogram], step: int) -> None:
        for each in histograms:
            bins, prefix = [each.first * each.width, *each.edges], f"{each.set_name}_" if each.set_name else ""
            for name, counts in each.counts.items():
                histogram = self._trackio.Histogram(np_histogram=(counts, bins))
                self._run.log({f"val/{prefix}rewards_{name}": histogram}, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        table = self._trackio.Table(columns=COLUMNS, data=[cells(sample) for sample in samples])
        self._run.log({"samples": table}, step=step)

    def log_hyperparams(self, params: dict[str, object]) -> None:
        self._run.config.update(json.loads(json.dumps(params, default=str)))

    def emit(self, record: logging.LogRecord) -> None:
        text = redacted(record.getMessage())
        if record.name.startswith("nemo_kto") and text not in self._seen:
            self._seen.add(text)
            try:
                self._alert(text[:_MAX_TITLE], text, "WARN" if record.levelno < logging.ERROR else "ERROR")
            except Exception:  # a warning must not end the run; the next metrics report what is wrong
                logging.root.removeHandler(self)

    def finalize(self, status: str) -> None:
        logging.root.removeHandler(self)
        error = sys.exc_info()[1]
        if status == "success":
            self._alert("training ended", None, "INFO")
        else:
            self._alert("training failed", None if error is None else describe(error), "ERROR")
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()

    def _alert(self, title: str, text: str | None, level: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # the terminal shows the warning already
            self._run.alert(title, text, self._trackio.AlertLevel[level], step=self._step)
