"""Text of the summaries at start and end of a run, from plain values."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from nemo_kto.errors import plural
from nemo_kto.telemetry.console import terminal_width
from nemo_kto.telemetry.loggers import read_metrics
from nemo_kto.telemetry.progress import ONE_VALIDATION_SET, SHOWN
from nemo_kto.utils.text import terminal_line

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
