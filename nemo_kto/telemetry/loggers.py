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

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...
    def log_hyperparams(self, params: dict[str, object]) -> None: ...
    def finalize(self, status: str) -> None: ...


class JsonLines:
    """One JSON object a line: {"step": ..., "time": seconds since 1970, metric: value, ...}; what is not finite is null.

    A line is written in one piece as soon as it is logged, so that a killed run loses nothing it has reported.
    """

    def __init__(self, *, file: Path, resumed_step: int | None) -> None:
        """Open ``file``; lines past ``resumed_step`` are dropped, as those steps are made again; None starts a new file."""
        lines = _lines_up_to(file, resumed_step) if resumed_step is not None and file.exists() else []
        with publish_file(file) as writing:
            writing.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self._file: TextIO = file.open("a", buffering=1, encoding="utf-8")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")

    def log_hyperparams(self, params: dict[str, object]) -> None:
        """Nothing: the run folder has its config.yaml."""

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

        Raises:
            ModuleNotFoundError: a logger is switched on whose package is not installed.
        """
        self._sinks: list[Sink] = []
        for package, switch in (("tensorboard", tensorboard), ("wandb", wandb is not None), ("mlflow", mlflow is not None)):
            if switch and not installed(package):
                raise ModuleNotFoundError(missing_package(package))
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._sinks.append(JsonLines(file=folder / METRICS_FILE, resumed_step=resumed_step))
        if tensorboard:
            self._sinks.append(TensorBoard(folder=folder / "tensorboard", resumed_step=resumed_step))
        if wandb is not None:
            self._sinks.append(_wandb(folder, resumed_step, wandb))
        if mlflow is not None:
            self._sinks.append(_mlflow(folder, resumed_step, mlflow))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics after optimizer step ``step`` (0 = before the first)."""
        values = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.log_metrics(dict(values), step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """Record the configuration of the run."""
        for sink in self._sinks:
            sink.log_hyperparams(dict(params))

    def finalize(self, status: str) -> None:
        """Flush and close everything; ``status`` is "success", "failed" or "aborted", as Lightning's loggers know them."""
        for sink in self._sinks:
            sink.finalize(status)
        self._sinks = []


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


def _known_identity(file: Path, resumed_step: int | None) -> str | None:
    """The identity under which an outside service knows a resumed run; None for a new run."""
    return file.read_text(encoding="utf-8").strip() if resumed_step is not None and file.exists() else None


def _wandb(folder: Path, resumed_step: int | None, arguments: Mapping[str, object]) -> WandbLogger:
    from pytorch_lightning.loggers import WandbLogger

    file = folder / "wandb_run_id"
    identity = _known_identity(file, resumed_step) or uuid.uuid4().hex[:8]
    file.write_text(identity + "\n", encoding="utf-8")
    return WandbLogger(save_dir=str(folder), id=identity, resume="allow", **arguments)


def _mlflow(folder: Path, resumed_step: int | None, arguments: Mapping[str, object]) -> MLFlowLogger:
    from pytorch_lightning.loggers import MLFlowLogger

    # mlflow refuses new runs in plain folders, so the default is a database in one file.
    uri = arguments.get("tracking_uri") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    file = folder / "mlflow_run_id"
    logger = MLFlowLogger(**{**arguments, "tracking_uri": uri, "run_id": _known_identity(file, resumed_step)})
    file.write_text(f"{logger.run_id}\n", encoding="utf-8")
    return logger
