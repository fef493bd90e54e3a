"""Where the metrics of a run go: metrics.jsonl always; TensorBoard, Weights & Biases and MLflow by a switch.

The last two are Lightning's loggers, which need no Lightning Trainer. Only rank 0 logs. Names are NeMo-Aligner's behind a
prefix: train/loss, train/kl, train/rewards_chosen_mean ..., val/..., timing/... (seconds), perf/... .
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from nemo_kto.files import publish_file

if TYPE_CHECKING:
    from pytorch_lightning.loggers import MLFlowLogger, WandbLogger

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """What RunLogger fans out to; Lightning's loggers have this form."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""

    def finalize(self, status: str) -> None:
        """Flush and close."""


class HyperparamsSink(Sink, Protocol):
    """A sink that also records the configuration of a run."""

    def log_hyperparams(self, params: dict[str, object]) -> None:
        """Record the configuration."""


class JsonLines:
    """One JSON object a line: {"step": ..., "time": seconds since 1970, metric: value, ...}; what is not finite is null.

    A line is written in one piece as soon as it is logged, so that a killed run loses nothing it has reported.
    """

    def __init__(self, *, file: Path, resumed_step: int | None) -> None:
        """Open the file.

        Args:
            file: made if absent.
            resumed_step: steps of the run that are in the checkpoint; later lines are dropped, because those steps are about
                to be made again. None starts a new file.
        """
        lines = _lines_up_to(file, resumed_step) if resumed_step is not None and file.exists() else []
        with publish_file(file) as writing:
            writing.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self._file: TextIO = file.open("a", buffering=1, encoding="utf-8")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line."""
        row: dict[str, float | None] = {"step": step, "time": round(time.time(), 3)}
        row.update({name: value if math.isfinite(value) else None for name, value in metrics.items()})
        self._file.write(json.dumps(row) + "\n")

    def finalize(self, status: str) -> None:
        """Close the file."""
        self._file.close()


def _lines_up_to(file: Path, step: int) -> list[str]:
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # cut short when the run was killed
            continue
    return kept


class TensorBoard:
    """Event files. torch's own writer: Lightning's logger does the same, and its import takes a third of a second."""

    def __init__(self, *, folder: Path, resumed_step: int | None) -> None:
        """Open a new event file in ``folder``. Steps past ``resumed_step`` are about to be made again and are forgotten."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resumed_step is None else resumed_step + 1)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_hyperparams(self, params: dict[str, object]) -> None:
        """Record the configuration as a string."""
        self._writer.add_text("hyperparameters", f"```json\n{json.dumps(params, indent=2, default=str)}\n```")

    def finalize(self, status: str) -> None:
        """Flush and close."""
        self._writer.close()


class RunLogger:
    """Hands every metric to every sink, on rank 0; does nothing on the other ranks."""

    def __init__(
        self,
        *,
        folder: Path,
        enabled: bool,
        resumed_step: int | None = None,
        tensorboard: bool = True,
        wandb: Mapping[str, object] | None = None,
        mlflow: Mapping[str, object] | None = None,
        extra: tuple[Sink, ...] = (),
    ) -> None:
        """Open the sinks.

        Args:
            folder: of the run; made if absent.
            enabled: True on rank 0.
            resumed_step: optimizer steps done before this start, None for a new run.
            tensorboard: write event files to ``folder``/tensorboard.
            wandb: arguments of Lightning's WandbLogger; None switches it off.
            mlflow: arguments of Lightning's MLFlowLogger; None switches it off. Without a tracking_uri the figures go to
                ``folder``/mlflow.db.
            extra: further sinks, such as a :class:`~nemo_kto.telemetry.progress.Progress`.

        Raises:
            ModuleNotFoundError: a logger is switched on whose package is not installed.
        """
        self._sinks: list[Sink] = []
        self._with_hyperparams: list[HyperparamsSink] = []
        wanted = [("tensorboard", tensorboard), ("wandb", wandb is not None), ("mlflow", mlflow is not None)]
        for package, switched_on in wanted:
            if switched_on and not installed(package):
                raise ModuleNotFoundError(missing_package(package))
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._sinks.append(JsonLines(file=folder / METRICS_FILE, resumed_step=resumed_step))
        if tensorboard:
            self._with_hyperparams.append(TensorBoard(folder=folder / "tensorboard", resumed_step=resumed_step))
        if wandb is not None:
            self._with_hyperparams.append(_wandb(folder, resumed_step, wandb))
        if mlflow is not None:
            self._with_hyperparams.append(_mlflow(folder, resumed_step, mlflow))
        self._sinks.extend([*self._with_hyperparams, *extra])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics after optimizer step ``step`` (0 = before the first)."""
        values = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.log_metrics(dict(values), step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """Record the configuration of the run."""
        for sink in self._with_hyperparams:
            sink.log_hyperparams(dict(params))

    def finalize(self, status: str) -> None:
        """Flush and close everything.

        Args:
            status: "success", "failed" or "aborted", as Lightning's loggers know them.
        """
        for sink in self._sinks:
            sink.finalize(status)
        self._sinks, self._with_hyperparams = [], []


def installed(package: str) -> bool:
    """True if ``package`` can be imported; a mere folder of that name (wandb leaves one behind) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def missing_package(package: str) -> str:
    """What to tell someone who switched on a logger whose package is not there."""
    return (
        f"the {package} logger needs the package {package}, which is not installed; run `pip install {package}` or set "
        f"exp_manager.create_{package}_logger=false"
    )


def _remembered(file: Path, resumed_step: int | None, new: str) -> str:
    """The identity under which an outside service knows this run; it stays the same in a resumed run."""
    if resumed_step is not None and file.exists():
        return file.read_text(encoding="utf-8").strip()
    file.write_text(new + "\n", encoding="utf-8")
    return new


def _wandb(folder: Path, resumed_step: int | None, arguments: Mapping[str, object]) -> WandbLogger:
    from pytorch_lightning.loggers import WandbLogger

    identity = _remembered(folder / "wandb_run_id", resumed_step, uuid.uuid4().hex[:8])
    return WandbLogger(save_dir=str(folder), id=identity, resume="allow", **arguments)


def _mlflow(folder: Path, resumed_step: int | None, arguments: Mapping[str, object]) -> MLFlowLogger:
    from pytorch_lightning.loggers import MLFlowLogger

    # mlflow refuses new runs in plain folders, so the default is a database in one file.
    uri = arguments.get("tracking_uri") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    remembered = folder / "mlflow_run_id"
    known = remembered.read_text(encoding="utf-8").strip() if resumed_step is not None and remembered.exists() else None
    logger = MLFlowLogger(**{**arguments, "tracking_uri": uri, "run_id": known})
    _remembered(remembered, resumed_step, str(logger.run_id))
    return logger
