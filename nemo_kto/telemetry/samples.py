"""Samples: answers of a model to a few prompts, as the loggers show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

from nemo_kto.errors import plural
from nemo_kto.utils.saved_records import Count, read_lines_as

SAMPLES_FILE = "samples.jsonl"
Model = Literal["policy", "reference"]
_MLFLOW_TABLE = "samples.json"  # artifact of the run


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Answer of a model to a prompt; a line of samples.jsonl."""

    step: Count  # optimizer steps of the model; 0 is before training
    model: Model
    index: Count  # of the prompt, from 0
    prompt: str  # as the model gets it, or the last message of the user
    messages: list[Mapping[str, Any]] | None  # the whole prompt, if it was read as messages
    answer: str
    tokens: Count  # of the answer, including the one that ends it
    ended: bool  # the answer is complete; False if it was cut at the maximum number of tokens

    @property
    def cut_note(self) -> str:
        """Note in parentheses that the answer was cut; empty for a complete answer."""
        return "" if self.ended else f" (cut after {plural(self.tokens, 'token')})"


COLUMNS = [field.name for field in fields(Sample) if field.name != "messages"]  # of a table


def read_samples(file: Path, damaged: list[str] | None = None) -> list[Sample]:
    """Read a file of samples; damaged lines are skipped and described in ``damaged``, and a missing file has none."""
    return list(read_lines_as(Sample, file, damaged))


def markdown(sample: Sample) -> str:
    """Return prompt and answer as Markdown, which shows both unchanged."""
    prompt, answer = (indent(text, " " * 4, lambda line: True) for text in (sample.prompt, sample.answer))
    return f"**prompt**\n\n{prompt}\n\n**{sample.model}**{sample.cut_note}\n\n{answer}"


def log_to_wandb(logger: Any, samples: Sequence[Sample], step: int) -> None:
    """Write a table of the answers to all prompts; ``logger`` is Lightning's WandbLogger."""
    logger.log_text(key="samples", columns=COLUMNS, data=[_cells(sample) for sample in samples], step=step)


def log_to_mlflow(logger: Any, samples: Sequence[Sample], step: int) -> None:
    """Append the answers to a table, which is an artifact of the run; ``logger`` is Lightning's MLFlowLogger."""
    rows = [_cells(sample) for sample in samples]
    table = {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
    logger.experiment.log_table(logger.run_id, table, artifact_file=_MLFLOW_TABLE)


def _cells(sample: Sample) -> list[object]:
    values = asdict(sample)
    return [values[name] for name in COLUMNS]
