"""The Python interface: ``nemo_kto.train`` and the run that it returns.

The ranks are processes of their own, started as by the command `nemo-kto`, so that a notebook or a script only waits.
"""

from __future__ import annotations

import html
import inspect
import io
import re
import signal
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.job import Job
from nemo_kto.config import compose
from nemo_kto.config.checker import POSITIONS, quoted
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import config_type
from nemo_kto.data.rows.data_sources import data_prefix_of
from nemo_kto.errors import UserError, either, show
from nemo_kto.losses.loss import Loss
from nemo_kto.model_files.checkpoint_files import CHECKPOINTS, find_checkpoints
from nemo_kto.model_files.companion_files import auto_class
from nemo_kto.processes import ranks, signals
from nemo_kto.records.notification import notifying
from nemo_kto.records.plots import summary_picture
from nemo_kto.records.run_record import check_not_in_use, read_run
from nemo_kto.redaction import redacted
from nemo_kto.telemetry.display import figures_of, model_lines, table
from nemo_kto.telemetry.loggers import METRICS_FILE, read_metrics
from nemo_kto.utils.fields import echo, names

if TYPE_CHECKING:
    import pandas
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MODEL, _DATA = POSITIONS.values()
_CHECKING = threading.Lock()  # Hydra's state and the module with the objects belong to the whole process


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that was trained, as its files are now."""

    folder: Path
    model_path: Path  # the aligned model in Hugging Face format
    validations: Mapping[str, str]  # title of each validation set -> prefix of its metrics

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged metrics: one row for each step, with those of training, validation and checkpoint together."""
        steps: dict[int, dict[str, Any]] = {}
        for line in read_metrics(self.folder / METRICS_FILE):
            steps.setdefault(line["step"], {}).update(line)
        return [steps[step] for step in sorted(steps)]

    def metrics_frame(self) -> pandas.DataFrame:
        """Return the metrics as a DataFrame with one row for each step, whose index is the step.

        Raises UserError without the package pandas.
        """
        try:
            import pandas
        except ImportError as error:
            text = f"metrics_frame needs the package pandas, which cannot be imported ({error})"
            raise UserError(f"{text}; run `pip install pandas`, or read run.metrics") from error
        rows = pandas.DataFrame(self.metrics)
        return rows.set_index("step") if len(rows) else rows

    def _repr_html_(self) -> str:
        """Return the summary and the essential curves for a notebook, which shows a run that ends a cell."""
        summary_picture(read_run(self.folder), picture := io.BytesIO())
        image = f'<img src="data:image/png;base64,{b64encode(picture.getvalue()).decode()}" alt="curves" width="800">'
        return f"<pre>{html.escape(self.report())}</pre>{image}"

    def load(self, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the aligned model and its tokenizer with transformers; ``options`` go to the model's ``from_pretrained``.

        Raises UserError if the run exported no model.
        """
        if not self.model_path.is_dir():
            text = f"the run must have exported its model to {self.model_path}, got no such folder"
            raise UserError(f"{text}; train to the end with export.enabled=true, or: nemo-kto export {self.folder} FOLDER")
        import transformers

        from nemo_kto.data.tokens.chat_template import load_tokenizer

        loader = getattr(transformers, auto_class(self.model_path))
        model = loader.from_pretrained(self.model_path, local_files_only=True, **options)
        return model, load_tokenizer(self.model_path)

    def report(self) -> str:
        """Return a summary: first and last value of the main metrics, checkpoints, and how to load the model."""
        kept, exported = find_checkpoints(self.folder / CHECKPOINTS), {"exported model": "none"}
        if self.model_path.is_dir():
            exported = model_lines(self.model_path, auto_class=auto_class(self.model_path))
        lines = {
            **figures_of(self.folder / METRICS_FILE, validations=self.validations),
            "checkpoints": ", ".join(f"step {checkpoint.step}" for checkpoint in kept) or "none",
            **exported,
        }
        return table(f"run in {self.folder}", lines)


def train(
    algorithm: str,
    *,
    model: str | Path,
    data: Any,
    devices: int | str | None = None,
    folder: str | Path | None = None,
    loss: str | Loss | Callable[..., Any] | None = None,
    callbacks: Sequence[str | Mapping[str, object] | type[Callback] | Callback] = (),
    **settings: Any,
) -> Run:
    """Train a model, in ranks that are started for it, and wait for its end.

    The ranks are new processes; they neither run the caller's script again nor change the objects of this process. An
    interrupt (Ctrl-C) stops them: they finish their step and save a checkpoint; a second one ends them at once. The same
    call resumes the run.

    Args:
        algorithm: "kto" or "dpo".
        model: a Hugging Face folder; the value of pretrained_checkpoint.restore_from_path.
        data: rows as a list of mappings, a datasets.Dataset or a DataFrame, or a value of model.data.data_prefix: a path, a
            list of paths, or a mapping from train, validation and test to any of these.
        devices: number of ranks; None for trainer.devices.
        folder: run folder; None for exp_manager.explicit_log_dir.
        loss: the name of a loss, "module:NAME", a ``Loss``, or a loss function.
        callbacks: subclasses or instances of ``nemo_kto.algorithms.callbacks.Callback``, or "module:NAME". Each rank gets a
            copy of an instance.
        settings: values of other keys, passed as ``**{"model.optim.lr": 1e-6}``.

    Raises:
        UserError: the configuration, a file or a row is wrong; all mistakes of the configuration are in the message.
        KeyboardInterrupt: the run was interrupted, after its ranks have ended.
        RuntimeError: a rank failed; its error is in the message.
    """
    if algorithm not in RECIPES:
        raise UserError(f"algorithm must be {either(list(RECIPES))}, got {show(algorithm)}")
    if ranks.detect_world() is not None:
        raise UserError(f"nemo_kto.train must not run in a rank of torchrun or srun; start `nemo-kto {algorithm}` with them")
    recipe, shared = RECIPES[algorithm], dict[str, object]()  # objects for the ranks, by name
    source = compose.our_source(recipe)
    loss_key, cache_key = f"model.{algorithm}.preference_loss", "model.data.cache_dir"
    arguments = {
        _MODEL: model,
        _DATA: data,
        "trainer.devices": devices,
        "exp_manager.explicit_log_dir": folder,
        loss_key: None if loss is None else _path_of(loss, shared),
        "trainer.callbacks": [_path_of(callback, shared) for callback in callbacks] or None,
    }
    arguments = {key: value for key, value in arguments.items() if value is not None}
    if twice := [key for key in arguments if key in settings]:
        raise UserError(f"{', '.join(twice)} must be given once, got an argument of train and a setting; leave one out")
    with _CHECKING:
        cache_dir = settings.get(cache_key, compose.load(source=source).model.data.cache_dir)
    arguments[_DATA] = data_prefix_of(data, Path(cache_dir).expanduser() / "rows")
    known, section = names(config_type(recipe)), f"model.{algorithm}."
    # an option that only this loss has is added to the configuration
    added = [key for key in settings if key.startswith(section) and key not in known and loss_key in arguments]
    overrides = [f"{'+' * (key in added)}{key}={_text(key, value)}" for key, value in (arguments | settings).items()]
    job = Job(recipe=recipe, source=source, world=None, objects=shared)
    with _CHECKING:
        ranks.register_objects(shared)
        overrides = job.settled(overrides)
        run = job.checker(sweep=False).resolve(overrides)
    check_not_in_use(run.folder)
    return _run(job, run, overrides)


def _run(job: Job, run: ResolvedRun, overrides: Sequence[str]) -> Run:
    from nemo_kto.processes.launcher import RanksEnded  # imports torch

    ranks.begin_now()
    try:
        # the output of a notebook, or a redirected one, is not that of the process, which the ranks would inherit
        with notifying(run.cfg.exp_manager.notify, run.folder):
            job.start_ranks(run, overrides, output=None if sys.stdout is sys.__stdout__ else _show)
    except RanksEnded as end:
        message = redacted(end.message)
        if message and (end.status == signals.ENDED_EARLY or signal.SIGINT in end.received):
            _show(f"nemo-kto: {message}\n")
        if signal.SIGINT in end.received:
            raise KeyboardInterrupt from None
        if end.status == ranks.USAGE_ERROR:
            raise UserError(message or "the ranks rejected the run; their message is above") from None
        if end.status != signals.ENDED_EARLY:
            raise RuntimeError(message or f"the ranks ended with status {end.status}") from None
    return Run(
        folder=run.folder.absolute(), model_path=Path(run.cfg.export.path).absolute(), validations=run.validation_titles
    )


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _path_of(value: object, shared: dict[str, object]) -> object:
    """Return the value of a key that names a loss or a callback; objects are added to ``shared``."""
    if isinstance(value, str):
        return value.replace(":", ".")
    if isinstance(value, Mapping):
        return value
    if inspect.isfunction(value):
        value = Loss(function=value)
    name = getattr(value.function if isinstance(value, Loss) else value, "__name__", type(value).__name__)
    name = re.sub(r"\W", "", name)
    while name in shared:
        name += "_"
    shared[name] = value
    return f"{ranks.OBJECTS_MODULE}.{name}"


def _text(key: str, value: object) -> str:
    """Write a value for Hydra."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_text(key, inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(key, inner) for inner in value)}]"
    if isinstance(value, str | Path):
        return quoted(str(value))
    if value is None or isinstance(value, bool | int | float):
        return echo(value)
    if hasattr(value, "item"):  # a number of numpy
        return _text(key, value.item())
    raise UserError(f"{key} must be None, a bool, a number, a string, a path, a list or a mapping, got {show(value)}")
