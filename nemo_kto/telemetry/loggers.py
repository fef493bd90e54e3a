"""Loggers of a run: files of JSON lines always; TensorBoard, trackio, Weights & Biases and MLflow if enabled.

The last two use the loggers of Lightning, which need no Lightning Trainer. Only rank 0 logs. Metrics have the names of
NeMo-Aligner with a prefix: train/loss, train/kl, train/rewards_chosen_mean ..., val/..., timing/... (seconds), perf/... .
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_kto.errors import UserError, describe
from nemo_kto.redaction import redacted
from nemo_kto.telemetry.evaluations import (
    EXTREMES_FILE,
    REWARDS_FILE,
    SAMPLES_FILE,
    ExtremeRow,
    RewardHistogram,
    Sample,
    log_to_mlflow,
    log_to_wandb,
)
from nemo_kto.telemetry.tensorboard import TensorBoard
from nemo_kto.telemetry.trackio_board import TrackioBoard
from nemo_kto.utils.fields import Count, Number, Record, read_lines_as
from nemo_kto.utils.files import MAX_LINE_BYTES, open_file, publish_file, read_bytes, read_lines

if TYPE_CHECKING:
    from pytorch_lightning.loggers import MLFlowLogger, WandbLogger

METRICS_FILE = "metrics.jsonl"
WARNINGS_FILE = "warnings.jsonl"
_MAX_READ = 10_000  # warnings of a file that are read
_MAX_WARNINGS = 1000  # a program that warns more often says nothing new
logger = logging.getLogger(__name__)
_RUN_ID = re.compile(rb"([\w-]{1,64})\s*", re.ASCII)  # run id of a tracking service
_MLFLOW_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"  # read by mlflow; its default of 7 retries takes minutes


class JsonLines:
    """File with one JSON object per line; of metrics, {"step": ..., "time": seconds since 1970, metric: value, ...}.

    Non-finite metrics are written as null. Each line is written in one piece as soon as it is logged, so that a killed run
    loses nothing it has reported. While the disk is full, lines are kept in memory.
    """

    def __init__(self, *, file: Path, resumed_step: int | None) -> None:
        """Open ``file`` and drop lines after ``resumed_step``, because those steps are repeated; None starts a new file."""
        lines = _lines_up_to(file, resumed_step) if resumed_step is not None else []
        with publish_file(file) as writing:
            writing.write_bytes(b"".join(line + b"\n" for line in lines))
        self._file = file.open("ab", buffering=0)
        self._waiting, self._warned = bytearray(), False

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.add_lines([{"step": step, "time": round(time.time(), 3), **values}])

    def add_lines(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Write lines, each of which must have a "step"."""
        for line in lines:
            self._waiting += json.dumps(line).encode() + b"\n"
            self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if not self._warned:
                text = "%s cannot be written: %s; training continues, and the missing lines are written later if possible"
                logger.warning(text, self._file.name, error.strerror)
            self._warned = True

    def log_hyperparams(self, params: dict[str, object]) -> None:
        """Do nothing: the run folder contains config.yaml."""

    def finalize(self, status: str) -> None:
        """Write the pending lines and close the file."""
        self._write()
        self._file.close()


class _LogLine(Record, extra="allow"):
    """A line of metrics.jsonl: the step, and the value of each metric, null if it was not finite."""

    __pydantic_extra__: dict[str, Number | None]
    step: Count


def read_metrics(file: Path, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the step and the metrics of each line of a metrics.jsonl; see ``read_lines_as``."""
    return ({"step": line.step, **line.__pydantic_extra__} for line in read_lines_as(_LogLine, file, damaged))


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of any of these files; None if the line is truncated or damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None


def _lines_up_to(file: Path, step: int) -> list[bytes]:
    """Return the lines up to ``step``; if lines other than a truncated last one are damaged, a copy of the file is kept."""
    if not file.exists():
        return []
    kept, damaged = [], False
    try:
        with open_file(file) as lines:
            for line in read_lines(lines):
                if not line.endswith(b"\n"):  # a last line truncated by a killed run is not damage
                    damaged |= b"\0" in line or len(line) > MAX_LINE_BYTES
                elif (found := _step_of(line)) is None:
                    damaged = True
                elif found <= step:
                    kept.append(line[:-1])
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; move it away, or let this user read it") from error
    if damaged:
        aside = file.with_name(f"{file.name}.damaged")
        with publish_file(aside) as writing:
            shutil.copyfile(file, writing)
        logger.warning("%s is damaged: its readable lines are kept; the damaged file is now %s", file, aside)
    return kept


class RunLogger:
    """Logger that passes all metrics to all sinks on rank 0, and does nothing on the other ranks."""

    def __init__(
        self,
        *,
        folder: Path,
        enabled: bool,
        resumed_step: int | None = None,
        tensorboard: bool = True,
        trackio: Mapping[str, object] | None = None,
        wandb: Mapping[str, object] | None = None,
        mlflow: Mapping[str, object] | None = None,
        samples: bool = False,
        val_prefixes: Sequence[str] = ("val/",),
    ) -> None:
        """Open the sinks in the run folder, which is created if it does not exist.

        In a new run, a sink that cannot be opened is a UserError. A resumed run continues without it, and so does any run
        if a sink fails later: a logging error must not end a training run.

        Args:
            enabled: whether this rank logs; True on rank 0 only.
            resumed_step: optimizer steps done before the run was resumed; None for a new run.
            trackio: project and name of trackio's run; None disables it. Its folder is ``folder``/trackio, or TRACKIO_DIR.
            wandb, mlflow: arguments of Lightning's WandbLogger and MLFlowLogger; None disables them. Without a tracking_uri,
                MLflow writes to ``folder``/mlflow.db and mlflow_artifacts.
            samples: open samples.jsonl for :meth:`log_samples`.
            val_prefixes: prefixes of the metrics of the validation sets.
        """
        self._sinks: dict[str, Any] = {}  # name -> object with the methods of Lightning's loggers
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        to_open: dict[str, Callable[[], Any]] = {
            name: partial(JsonLines, file=folder / name, resumed_step=resumed_step) for name in _files(samples)
        }
        if tensorboard:
            to_open["tensorboard"] = lambda: TensorBoard(
                folder=folder / "tensorboard", resumed_step=resumed_step, val_prefixes=val_prefixes
            )
        if trackio is not None:
            to_open["trackio"] = partial(_trackio, folder, resumed_step, trackio, val_prefixes)
        if wandb is not None:
            to_open["wandb"] = partial(_wandb, folder, resumed_step, wandb)
        if mlflow is not None:
            to_open["mlflow"] = partial(_mlflow, folder, resumed_step, mlflow)
        for name, open_sink in to_open.items():
            try:
                self._sinks[name] = open_sink()
            except Exception as error:  # tracking services may raise any exception
                if resumed_step is None:
                    raise UserError(_cannot_open(name, _one_line(error))) from error
                self._drop(name, error)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics after optimizer step ``step``; 0 is before the first step."""
        values = {name: float(value) for name, value in metrics.items()}
        for name in [name for name in self._sinks if name not in (REWARDS_FILE, EXTREMES_FILE, SAMPLES_FILE)]:
            self._pass_on(name, lambda sink: sink.log_metrics(dict(values), step))

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        for name in [*self._sinks]:
            self._pass_on(name, lambda sink: sink.log_hyperparams(dict(params)))

    def finalize(self, status: str) -> None:
        """Flush and close all sinks; ``status`` is "success", "failed" or "aborted", as in the loggers of Lightning."""
        for name in [*self._sinks]:
            self._pass_on(name, lambda sink: sink.finalize(status))
        self._sinks = {}

    def log_samples(self, samples: Sequence[Sample], step: int, *, to_services: bool = True) -> None:
        """Record answers of the model after optimizer step ``step``; 0 is before the first step.

        ``to_services``: also in Weights & Biases and MLflow, which may be on other machines.
        """
        self._pass_on(SAMPLES_FILE, lambda file: file.add_lines(map(asdict, samples)))
        self._pass_on("tensorboard", lambda board: board.log_samples(samples, step))
        self._pass_on("trackio", lambda board: board.log_samples(samples, step))
        if to_services:
            self._pass_on("wandb", lambda wandb_logger: log_to_wandb(wandb_logger, samples, step))
            self._pass_on("mlflow", lambda mlflow_logger: log_to_mlflow(mlflow_logger, samples, step))

    def log_rewards(self, histograms: Sequence[RewardHistogram], step: int, extremes: Sequence[ExtremeRow] = ()) -> None:
        """Record the rewards of a validation after optimizer step ``step``; 0 is before the first step."""
        self._pass_on(REWARDS_FILE, lambda file: file.add_lines(each.line(step) for each in histograms))
        self._pass_on(EXTREMES_FILE, lambda file: file.add_lines(map(asdict, extremes)))
        for name in ("tensorboard", "trackio"):
            self._pass_on(name, lambda board: board.log_rewards(histograms, step))

    def _pass_on(self, name: str, action: Callable[[Any], object]) -> None:
        """Run an action on a sink, if it is open; a sink that fails is dropped."""
        if name in self._sinks:
            try:
                action(self._sinks[name])
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._sinks.pop(name, None)
        logger.warning("the log %s failed, and the run continues without it: %s", name, _one_line(error))


def check_loggers(
    *,
    folder: Path,
    tensorboard: bool = True,
    trackio: Mapping[str, object] | None = None,
    wandb: Mapping[str, object] | None = None,
    mlflow: Mapping[str, object] | None = None,
    samples: bool = False,
    val_prefixes: Sequence[str] = (),
) -> None:
    """Raise a UserError that names all loggers whose package or file :class:`RunLogger` could not open; nothing is written.

    A tracking service is first contacted when its run starts.
    """

    def check_tensorboard() -> None:
        import_package("torch.utils.tensorboard", package="tensorboard")
        _check_path(folder / "tensorboard", Path.is_dir)

    checks: dict[str, Callable[[], object]] = {
        name: partial(_check_path, folder / name, Path.is_file) for name in _files(samples)
    }
    if tensorboard:
        checks["tensorboard"] = check_tensorboard
    services = {"wandb": wandb, "mlflow": mlflow}
    if trackio is not None:
        checks["trackio"] = partial(_import_trackio, folder)
    checks |= {name: partial(import_package, name) for name, given in services.items() if given is not None}
    failures = []
    for name, check in checks.items():
        try:
            check()
        except Exception as error:  # an incompatible package may raise any exception
            failures.append(_cannot_open(name, _one_line(error)))
    if failures:
        raise UserError("\n  ".join(["nothing was started:", *failures]) if len(failures) > 1 else failures[0])


def _files(samples: bool) -> list[str]:
    """Return the names of the files of a run."""
    return [METRICS_FILE, REWARDS_FILE, EXTREMES_FILE, *([SAMPLES_FILE] if samples else [])]


def _check_path(path: Path, right_kind: Callable[[Path], bool]) -> None:
    """Raise OSError if ``path`` exists, and is of another kind or cannot be written."""
    if path.exists() and not right_kind(path):
        raise FileExistsError(f"{path} exists and is of another kind")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def import_package(module: str, *, package: str | None = None) -> Any:
    """Import a module of ``package`` (default: of that name); UserError if it is not installed or cannot be imported."""
    package = package or module
    if not installed(package):
        raise UserError(missing_package(package))
    try:
        return importlib.import_module(module)
    except Exception as error:  # an incompatible package may raise any exception
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        raise UserError(
            f"the package {package} {version} is installed but cannot be imported ({_one_line(error)}); install a version "
            f"that fits the other packages: pip install -c constraints.txt --upgrade {package}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join((str(error) if isinstance(error, UserError) else describe(error)).split())


def _cannot_open(name: str, why: str) -> str:
    remedy = "" if name in _files(True) else f", or set exp_manager.create_{name}_logger=false"
    return f"the log {name} cannot be opened: {why}; make it available{remedy}"


def installed(package: str) -> bool:
    """Return whether ``package`` is installed; a plain folder of that name does not count (wandb leaves one behind)."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def missing_package(package: str) -> str:
    return (
        f"the {package} logger needs the package {package}, which is not installed; run `pip install {package}` or set "
        f"exp_manager.create_{package}_logger=false"
    )


def saved_run_id(file: Path, resumed_step: int | None) -> str | None:
    """Return the id of a resumed run in a tracking service; None for a new run."""
    if resumed_step is None or not file.exists():
        return None
    try:
        match = _RUN_ID.fullmatch(read_bytes(file))
    except OSError:
        match = None
    if match is None:
        logger.warning("%s is damaged: metrics are logged to a new run of the tracking service", file)
        return None
    return match[1].decode()


def _save_run_id(file: Path, run_id: str) -> None:
    with publish_file(file) as writing:
        writing.write_text(run_id + "\n", encoding="utf-8")


def _import_trackio(folder: Path) -> Any:
    """Import trackio, which takes its folder from TRACKIO_DIR when it is imported."""
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
    return import_package("trackio")


def _trackio(
    folder: Path, resumed_step: int | None, arguments: Mapping[str, Any], val_prefixes: Sequence[str]
) -> TrackioBoard:
    trackio = _import_trackio(folder)
    return TrackioBoard(trackio=trackio, resumed=resumed_step is not None, val_prefixes=val_prefixes, **arguments)


def _wandb(folder: Path, resumed_step: int | None, arguments: Mapping[str, object]) -> WandbLogger:
    import_package("wandb")
    from pytorch_lightning.loggers import WandbLogger

    file = folder / "wandb_run_id"
    run_id = saved_run_id(file, resumed_step) or uuid.uuid4().hex[:8]
    _save_run_id(file, run_id)
    wandb_logger = WandbLogger(save_dir=str(folder), id=run_id, resume="allow", **arguments)
    del sys.argv[1:]  # W&B records the command line at its end too, and it may have secrets; its keys are logged
    _ = wandb_logger.experiment  # accessing the property starts the W&B run
    return wandb_logger


def _mlflow(folder: Path, resumed_step: int | None, arguments: Mapping[str, object]) -> MLFlowLogger:
    mlflow = import_package("mlflow")
    if resumed_step is None and (tracking_uri := arguments.get("tracking_uri")):
        _contact_mlflow(mlflow, tracking_uri)
    from pytorch_lightning.loggers import MLFlowLogger

    file = folder / "mlflow_run_id"
    settings = {**arguments, "run_id": saved_run_id(file, resumed_step)}
    if not arguments.get("tracking_uri"):
        # an SQLite file, because MLflow rejects new runs in plain folders; its artifacts would be in the working directory
        settings["tracking_uri"] = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        settings["artifact_location"] = (folder / "mlflow_artifacts").resolve().as_uri()
    mlflow_logger = MLFlowLogger(**settings)
    _save_run_id(file, str(mlflow_logger.run_id))
    return mlflow_logger


def _contact_mlflow(mlflow: Any, tracking_uri: object) -> None:
    """Ask the server of a new run for an experiment, with one retry, so that a wrong address ends the run at once."""
    is_set = _MLFLOW_RETRIES in os.environ
    os.environ.setdefault(_MLFLOW_RETRIES, "1")
    try:
        mlflow.MlflowClient(tracking_uri=tracking_uri).search_experiments(max_results=1)
    finally:
        if not is_set:
            del os.environ[_MLFLOW_RETRIES]


class LoggedWarning(Record):
    """A line of warnings.jsonl."""

    step: Count
    text: str


def read_warnings(file: Path, damaged: list[str] | None = None) -> list[LoggedWarning]:
    """Read a file of warnings; damaged lines are skipped and described in ``damaged``, and a missing file has none."""
    return list(islice(read_lines_as(LoggedWarning, file, damaged), _MAX_READ))


class WarningsFile(logging.Handler):
    """Handler that writes warnings and errors to warnings.jsonl: {"step", "time", "level", "text"}, each text once.

    Warnings before :meth:`open_file`, such as those about the data, are kept until then: a run whose checks fail leaves its
    folder as it was.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._waiting: list[dict[str, object]] = []
        self._seen: set[str] = set()
        self._lines: JsonLines | None = None
        self._step: Callable[[], int] = int

    def open_file(self, folder: Path, *, step: Callable[[], int], resumed_step: int | None) -> None:
        """Write to the run folder from now on; ``step`` returns the number of steps done.

        In a resumed run, the warnings after its step are dropped first.
        """
        self._lines, self._step = JsonLines(file=folder / WARNINGS_FILE, resumed_step=resumed_step), step
        self._lines.add_lines({**line, "step": step()} for line in self._waiting)
        self._waiting = []

    def emit(self, record: logging.LogRecord) -> None:
        text = redacted(record.getMessage())
        if text in self._seen or len(self._seen) >= _MAX_WARNINGS:
            return
        self._seen.add(text)
        level = "error" if record.levelno >= logging.ERROR else "warning"
        line = {"step": self._step(), "time": round(record.created, 3), "level": level, "text": text}
        if self._lines is None:
            self._waiting.append(line)
        else:
            self._lines.add_lines([line])

    def close(self) -> None:
        if self._lines is not None:
            self._lines.finalize("")
            self._lines = None
        super().close()


@contextlib.contextmanager
def collect_warnings() -> Iterator[WarningsFile]:
    """Collect all warnings and errors of the process within the block, for the file of a run."""
    handler = WarningsFile()
    logging.root.addHandler(handler)
    try:
        yield handler
    finally:
        logging.root.removeHandler(handler)
        handler.close()
