"""Text of the summaries at start and end of a run, from plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_kto.telemetry.loggers import parse_line
from nemo_kto.telemetry.progress import ONE_VALIDATION_SET, SHOWN
from nemo_kto.telemetry.timers import duration_text
from nemo_kto.utils.files import open_file, read_lines


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """Row counts of a data split; None if not counted."""

    unit: str  # rows or pairs
    rows: int
    classes: Mapping[str, int] = field(default_factory=dict)  # rows of each class; empty if there is only one
    tokens: int | None = None  # of prompts and responses together
    cut_prompts: int | None = None  # with a truncated prompt
    cut_responses: int | None = None  # with a truncated response

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {name}" for name, count in self.classes.items())
        parts = [f"{self.rows:,} {self.unit}" + (f" ({kinds})" if kinds else "")]
        if self.tokens is not None:
            parts.append(f"{self.tokens:,} tokens")
        cut = {"prompts": self.cut_prompts, "responses": self.cut_responses}
        if truncated := [f"{count:,} {what}" for what, count in cut.items() if count]:
            parts.append(f"{' and '.join(truncated)} truncated")
        elif None not in cut.values():
            parts.append("none truncated")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Summary of a run before its first step."""

    command: str
    model: str  # folder of the initial model
    family: str  # architecture family of the model
    parameters: int  # of the whole model
    adapters: str | None  # description; None if all weights are trained
    trained: int  # number of trained parameters
    splits: Mapping[str, SplitRows]
    steps: int  # of the whole run
    steps_per_epoch: int
    resumed_step: int | None  # number of steps already done; None for a new run
    global_batch: int  # examples per step
    micro_batch: str  # description of the limits
    data_parallel: int
    context_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    stages: str  # further description of the pipeline stages; may be empty
    sequence_parallel: bool
    device: str
    precision: str  # with the reason, like ``reference``
    reference: str
    folder: str  # run folder
    slow_paths: Sequence[str] = ()  # computations that could be faster on this device, and what they need for that
    labels: str = ""  # which values mean desirable and undesirable; empty for pairs
    expert_parallel: int | None = None  # ranks across which the experts of a layer are partitioned; None for a dense model

    def __str__(self) -> str:
        what = "all trained" if self.adapters is None else f"{short(self.trained)} in adapters trained"
        resumed = "" if self.resumed_step is None else f", resumed after step {self.resumed_step}"
        ranks = self.data_parallel * self.context_parallel * self.tensor_parallel * self.pipeline_parallel
        degrees = layout_text(
            data=self.data_parallel,
            context=self.context_parallel,
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            stages=self.stages,
            sequence_parallel=self.sequence_parallel,
        )
        experts = "" if self.expert_parallel is None else f", experts over {self.expert_parallel}"
        lines = {
            "model": f"{self.model} ({self.family}), {short(self.parameters)} parameters, {what}",
            "adapters": self.adapters or "none",
            **{name: str(rows) for name, rows in self.splits.items()},
            **({"labels": self.labels} if self.labels else {}),
            "steps": f"{self.steps:,} ({epochs(self.steps, self.steps_per_epoch)}){resumed}",
            "batch": f"{self.global_batch:,} {self.splits['train'].unit} a step, micro-batches of {self.micro_batch}",
            "layout": "1 rank" if ranks == 1 else f"{ranks} ranks = {degrees}{experts}",
            "device": self.device,
            "precision": self.precision,
            "reference": self.reference,
            "run folder": self.folder,
        }
        lines |= {f"slow path {number}": path for number, path in enumerate(self.slow_paths, start=1)}
        return table(self.command, lines)


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Summary of a run after training."""

    command: str
    step: int  # the last step done
    steps: int  # of the whole run
    steps_per_epoch: int
    seconds: float  # wall-clock time since the first step of the new or resumed run
    stopped_by: str | None  # limit that ended the run before its last step; None if there was none
    reached: Mapping[str, str]  # first and last value of each metric by label, see :func:`figures_of`
    best: str  # the best checkpoint, with the reason
    exports: Mapping[str, str]  # path of each export, and how to load it, by label
    train_longer: str  # overrides to append to the command to train longer
    metrics: str  # their location
    early_stopping: str | None = None  # reason; None if the run was not stopped early

    def __str__(self) -> str:
        stopped_by = self.stopped_by if self.early_stopping is None else "early stopping"
        state = "finished" if stopped_by is None else f"stopped by {stopped_by}"
        of = f"step {self.step:,} of {self.steps:,} ({epochs(self.step, self.steps_per_epoch)})"
        command = "the same command" + (f" with {self.train_longer}" if self.train_longer else "")
        lines = {
            **({} if self.early_stopping is None else {"early stopping": self.early_stopping}),
            **self.reached,
            "best checkpoint": self.best,
            **self.exports,
            "train longer" if self.stopped_by is None else "resume": command,
            "metrics": self.metrics,
        }
        return table(f"{self.command} {state} after {of} in {duration_text(self.seconds)}", lines)


def layout_text(*, data: int, context: int, tensor: int, pipeline: int, stages: str, sequence_parallel: bool) -> str:
    """Describe the degrees of parallelism, whose product is the number of ranks; ``stages`` may be empty."""
    degrees = [(data, "data"), (context, "context"), (tensor, "tensor"), (pipeline, "pipeline")]
    text = " x ".join(f"{degree} {name}" for degree, name in degrees if name != "context" or degree > 1)
    return f"{text} parallel{f' ({stages})' if stages else ''}{', sequence parallel' if sequence_parallel else ''}"


def table(title: str, lines: Mapping[str, str]) -> str:
    """Format a title and, below it, the lines with their labels in a column."""
    width = max(map(len, lines)) + 2
    return "\n".join([title, *(f"  {label:{width}}{text}" for label, text in lines.items())])


def model_lines(folder: Path, what: str = "") -> dict[str, str]:
    """Return lines with the folder of a model in Hugging Face format, its description ``what``, and how to load it."""
    load = f'transformers.AutoModelForCausalLM.from_pretrained("{folder}")'
    return {"exported model": f"{folder} ({what})" if what else str(folder), "load it with": load}


def adapter_lines(folder: Path) -> dict[str, str]:
    """Return lines with the folder of adapters in PEFT format, and how to load them."""
    load = f'peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")'
    return {"exported adapters": str(folder), "load them with": load}


def epochs(steps: int, steps_per_epoch: int) -> str:
    """Describe ``steps`` as a number of epochs."""
    count, per_step = steps / steps_per_epoch, "1 step" if steps_per_epoch == 1 else f"{steps_per_epoch:,} steps"
    return f"{count:.3g} {'epoch' if count == 1 else 'epochs'} of {per_step}"


def short(number: int) -> str:
    """Format a large number with three digits: 135 M."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            digits = max(0, 3 - len(str(number // size)))
            return f"{number / size:.{digits}f} {unit}"
    return f"{number:,}"


def figures_of(metrics_file: Path, *, validations: Mapping[str, str] = ONE_VALIDATION_SET) -> dict[str, str]:
    """Return the first and the last value of each main metric in a metrics.jsonl as text, by label.

    ``validations``: title of each validation set -> prefix of its metrics.
    """
    of_sets = {f"{prefix}{name}": f"{title} {label}" for title, prefix in validations.items() for label, name in SHOWN}
    names = {"train/loss": "train loss", **of_sets}
    first: dict[str, tuple[int, float]] = {}
    last: dict[str, tuple[int, float]] = {}
    if metrics_file.is_file():  # missing if the log could not be opened
        with open_file(metrics_file) as lines:
            for logged in filter(None, map(parse_line, read_lines(lines))):
                for name in names:
                    if (value := logged.get(name)) is not None:
                        last[name] = int(logged["step"]), value
                        first.setdefault(name, last[name])
    texts: dict[str, str] = {}
    for name, (step, value) in last.items():
        first_step, first_value = first[name]
        if step == first_step:
            texts[name] = f"{value:.4f} (step {step:,})"
        else:
            texts[name] = f"{first_value:.4f} -> {value:.4f} (steps {first_step:,} and {step:,})"
    return {label: texts[name] for name, label in names.items() if name in texts}
