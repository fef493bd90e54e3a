"""Samples: answers of a model to a few prompts, as the loggers show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from nemo_kto.utils.files import open_file, read_lines

SAMPLES_FILE = "samples.jsonl"
Model = Literal["policy", "reference"]
_MLFLOW_TABLE = "samples.json"  # artifact of the run


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Answer of a model to a prompt; a line of samples.jsonl."""

    step: int  # optimizer steps of the model; 0 is before training
    model: Model
    index: int  # of the prompt, from 0
    prompt: str  # as the model gets it, or the last message of the user
    messages: list[Mapping[str, Any]] | None  # the whole prompt, if it was read as messages
    answer: str
    tokens: int  # of the answer, including the one that ends it
    ended: bool  # the answer is complete; False if it was cut at the maximum number of tokens


COLUMNS = [field.name for field in fields(Sample) if field.name != "messages"]  # of a table


def read_samples(file: Path) -> list[Sample]:
    """Read a file of samples; truncated or damaged lines are skipped, and a missing file has none."""
    found = []
    try:
        with open_file(file) as handle:
            for line in read_lines(handle):
                try:
                    found.append(Sample(**json.loads(line)))
                except (ValueError, TypeError, RecursionError):
                    continue
    except OSError:
        return []
    return found


def markdown(sample: Sample) -> str:
    """Return prompt and answer as Markdown, which shows both unchanged."""
    note = "" if sample.ended else f" (cut after {sample.tokens} tokens)"
    return f"**prompt**\n\n{_block(sample.prompt)}\n\n**{sample.model}**{note}\n\n{_block(sample.answer)}"


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def log_to_wandb(logger: Any, samples: Sequence[Sample], step: int) -> None:
    """Write a table of all prompts; ``logger`` is Lightning's WandbLogger."""
    logger.log_text(key="samples", columns=COLUMNS, data=[_cells(sample) for sample in samples], step=step)


def log_to_mlflow(logger: Any, samples: Sequence[Sample], step: int) -> None:
    """Append to a table, which is an artifact of the run; ``logger`` is Lightning's MLFlowLogger."""
    rows = [_cells(sample) for sample in samples]
    table = {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
    logger.experiment.log_table(logger.run_id, table, artifact_file=_MLFLOW_TABLE)


def _cells(sample: Sample) -> list[object]:
    values = asdict(sample)
    return [values[name] for name in COLUMNS]
