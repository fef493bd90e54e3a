"""Text on the terminal: the progress of a run, and the summaries at its start and end."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from nemo_kto.errors import plural
from nemo_kto.telemetry.console import DEFAULT_WIDTH, terminal_width
from nemo_kto.telemetry.loggers import read_metrics
from nemo_kto.telemetry.watch import duration_text
from nemo_kto.utils.text import terminal_line

if TYPE_CHECKING:
    from tqdm import tqdm

Item = TypeVar("Item")

_LINE_SECONDS = 5  # interval between two progress lines in a file
_MEASURED = 3  # log lines before the time of the run is estimated; the first one takes longer and is left out
# Label on the screen, and name of the metric without its prefix "train/" or "val/".
SHOWN = (("loss", "loss"), ("kl", "kl"), ("delta", "delta"), ("acc", "acc"), ("auc", "auc"), ("margin", "rewards_margin"))
ONE_VALIDATION_SET: Mapping[str, str] = {"validation": "val/"}
_BAR, _BAR_WIDTH = "{percentage:3.0f}%|{bar}| ", 17  # columns of the percentage and a bar of at least ten characters


@dataclass(kw_only=True, eq=False)
class Progress:
    """Progress display: step, loss, kl or delta, acc or auc, margin, seconds per step, tokens per second and remaining time.

    It has the interface of a logger and selects the displayed values from the logged metrics. Once the stream cannot be
    written (the terminal is closed, the disk is full), nothing more is shown.
    """

    total_steps: int  # of the whole run
    start_step: int = 0  # steps already done, in a resumed run
    validations: Mapping[str, str] = field(default_factory=lambda: ONE_VALIDATION_SET)  # title -> prefix of its metrics
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic  # seconds since some fixed moment

    def __post_init__(self) -> None:
        self._began = self._last = self.clock()
        self._step = self.start_step
        self._seconds: list[float] = []
        self._bar: tqdm[None] | None = None
        if self.stream.isatty():
            from tqdm import tqdm

            shown = f"{_BAR}step {self._step}/{self.total_steps}"
            self._bar = tqdm(total=self.total_steps, initial=self.start_step, file=self.stream, bar_format=shown)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the metrics train/..., val/... and perf/... after ``step``; other metrics are ignored."""
        with self._until_stream_fails():
            if any(name.startswith("train/") for name in metrics):
                self._show_training(metrics, step)
            for title, prefix in self.validations.items():
                if any(name.startswith(prefix) for name in metrics):
                    self.line(f"step {step}/{self.total_steps}  {title}: {'  '.join(_values(metrics, prefix))}")

    def _show_training(self, metrics: Mapping[str, float], step: int) -> None:
        now = self.clock()
        # the measured step time; without it, the time since the last line, with any validation or checkpoint in between
        seconds = metrics.get("timing/step_time", (now - self._last) / max(1, step - self._step))
        self._seconds.append(seconds)
        left = (now - self._began) / max(1, step - self.start_step) * max(0, self.total_steps - step)
        self._last, self._step = now, step
        values = [*_values(metrics, "train/"), f"{seconds:.2f} s/step"]
        if "perf/tokens_per_sec" in metrics:
            values.append(f"{metrics['perf/tokens_per_sec']:.0f} tokens/s")
        done, eta = f"step {step}/{self.total_steps}", f"eta {timedelta(seconds=round(left))}"
        if self._bar is None:
            self.line("  ".join([done, *values, eta]))
        else:
            self._bar.ncols = (terminal_width(self.stream) or DEFAULT_WIDTH) - 1
            text = f"{done}  {eta}"
            for value in values:  # those for which the terminal has room
                if len(f"{text}  {value}") > self._bar.ncols - _BAR_WIDTH:
                    break
                text += f"  {value}"
            self._bar.bar_format = f"{_BAR}{text}"
            self._bar.update(step - self._bar.n)
        if len(self._seconds) == _MEASURED and step < self.total_steps:
            per_step = sum(self._seconds[1:]) / (_MEASURED - 1)
            total = now - self._began + per_step * (self.total_steps - step)
            self.line(f"estimated time: {duration_text(total)} ({per_step:.2g} s a step)")

    def line(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def finalize(self, status: str) -> None:
        """Close the bar, and show ``status`` if the run did not succeed."""
        with self._until_stream_fails():
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            if status != "success":
                self.line(f"step {self._step}/{self.total_steps}  {status}")

    @contextlib.contextmanager
    def _until_stream_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.stream, self._bar = io.StringIO(), None


def progress_bar(
    items: Iterable[Item], *, total: int, title: str, shown: bool, clock: Callable[[], float] = time.monotonic
) -> Iterator[Item]:
    """Yield the items and show progress if ``shown``: a bar on a terminal, a line every few seconds in a file."""
    from tqdm import tqdm

    stream, title = sys.stderr, terminal_line(title)
    if not shown:
        yield from items
    elif stream.isatty():
        yield from tqdm(items, total=total, desc=title, file=stream, unit="batch", leave=False)
    else:
        printed_at = clock()
        for number, item in enumerate(items, start=1):
            yield item
            if clock() - printed_at >= _LINE_SECONDS:
                print(f"{title} {number}/{total}", file=stream, flush=True)
                printed_at = clock()


def _values(metrics: Mapping[str, float], prefix: str) -> list[str]:
    values = []
    for label, name in SHOWN:
        if prefix + name in metrics:
            values.append(f"{label} {metrics[prefix + name]:.4f}")
            estimate = metrics.get(f"{prefix}kl_unclamped", 0.0)
            if name == "kl" and estimate < 0:  # it was clamped to 0
                values[-1] += f" (unclamped {estimate:.2g})"
    return values


_CAUSAL = "AutoModelForCausalLM"  # class of transformers that loads text models


def layout_text(
    *,
    data: int,
    context: int,
    tensor: int,
    pipeline: int,
    stages: str,
    sequence_parallel: bool,
    experts: str = "",
    optimizer_instances: int = 1,
) -> str:
    """Describe the ranks and the degrees of parallelism; ``stages`` and ``experts`` may be empty."""
    if (ranks := data * context * tensor * pipeline) == 1:
        return "1 rank"
    degrees = [(data, "data"), (context, "context"), (tensor, "tensor"), (pipeline, "pipeline")]
    text = " x ".join(f"{degree} {name}" for degree, name in degrees if name != "context" or degree > 1)
    details = ["sequence parallel"] * sequence_parallel + ([f"experts over {experts}"] if experts else [])
    details += [f"{optimizer_instances} optimizer instances"] * (optimizer_instances > 1)
    return ", ".join([f"{ranks} ranks = {text} parallel{f' ({stages})' if stages else ''}", *details])


def table(title: str, lines: Mapping[str, str]) -> str:
    """Format a title and, below it, the lines with their labels in a column, wrapped if stdout is a terminal."""
    indent, width = max(map(len, lines)) + 4, terminal_width(sys.stdout) or sys.maxsize
    # words, such as paths, are not broken
    whole_words = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    wrap = partial(whole_words, width=width, replace_whitespace=False, expand_tabs=False)
    margin = " " * indent
    wrapped = {
        label: wrap(terminal_line(text), initial_indent=margin, subsequent_indent=margin) for label, text in lines.items()
    }
    return "\n".join(
        [wrap(terminal_line(title)), *(f"{f'  {label}':{indent}}{text[indent:]}" for label, text in wrapped.items())]
    )


def model_lines(folder: Path, what: str = "", *, auto_class: str = _CAUSAL) -> dict[str, str]:
    """Return lines with the folder of a model in Hugging Face format, its description ``what``, and how to load it."""
    load = f'transformers.{auto_class}.from_pretrained("{folder}")'
    return {"exported model": f"{folder} ({what})" if what else str(folder), "load it with": load}


def adapter_lines(folder: Path, *, auto_class: str = _CAUSAL) -> dict[str, str]:
    """Return lines with the folder of adapters in PEFT format, and how to load them."""
    load = f'peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")'
    if auto_class != _CAUSAL:
        load = f'peft.PeftModel.from_pretrained(transformers.{auto_class}.from_pretrained(MODEL), "{folder}")'
    return {"exported adapters": str(folder), "load them with": load}


def epochs(steps: int, steps_per_epoch: int) -> str:
    """Describe ``steps`` as a number of epochs."""
    count = steps / steps_per_epoch
    return f"{count:.3g} {'epoch' if count == 1 else 'epochs'} of {plural(steps_per_epoch, 'step')}"


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
    for logged in read_metrics(metrics_file):  # none if the log could not be opened
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
