"""Results of a validation apart from its metrics: rewards as histograms and of the most extreme rows; answers to prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from nemo_kto.errors import plural
from nemo_kto.utils import lazy_import
from nemo_kto.utils.fields import Count, Number, Record, read_lines_as

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

SAMPLES_FILE = "samples.jsonl"
REWARDS_FILE = "rewards.jsonl"  # a line for each validation of a set
EXTREMES_FILE = "extremes.jsonl"
MAX_BINS = 100
Model = Literal["policy", "reference"]
_MLFLOW_TABLE = "samples.json"  # artifact of the run
_MIN_EXPONENT = -20  # of the width of a bin; also the width if all rewards are equal


@dataclass(frozen=True, kw_only=True)
class RewardHistogram:
    """Counts of the rewards of each class: bin i of a class covers [(first + i) * width, (first + i + 1) * width).

    The width is the smallest power of two for which at most 100 bins cover all rewards, so that a bin of a wider histogram
    consists of whole bins of a narrower one, and histograms of different validations can be brought to one width exactly.

    Attributes:
        set_name: name of the validation set; empty for a single set without a name.
        counts: name of the class -> number of examples in each bin; all classes have the same bins.
    """

    set_name: str
    width: float
    first: int
    counts: Mapping[str, list[int]]

    @classmethod
    def of(cls, set_name: str, rewards: Mapping[str, Tensor]) -> RewardHistogram | None:
        """Count the finite rewards of each class, [N] float64 each; None if there are none.

        Examples:
            >>> RewardHistogram.of("", {"desirable": torch.tensor([40.0, 55.5]), "undesirable": torch.tensor([39.0])})
            RewardHistogram(set_name='', width=0.25, first=156, counts={...})
        """
        finite = {name: values_N[values_N.isfinite()].double() for name, values_N in rewards.items()}
        values_N = torch.cat([*finite.values()])
        if not len(values_N):
            return None
        low, high = values_N.min().item(), values_N.max().item()
        exponent = _MIN_EXPONENT if low == high else max(_MIN_EXPONENT, math.floor(math.log2((high - low) / MAX_BINS)))
        while math.floor(high / 2.0**exponent) - math.floor(low / 2.0**exponent) >= MAX_BINS:
            exponent += 1
        width = 2.0**exponent
        first = math.floor(low / width)
        bins = math.floor(high / width) - first + 1
        counts = {
            name: torch.bincount(((each_N / width).floor() - first).long(), minlength=bins).tolist()
            for name, each_N in finite.items()
        }
        return cls(set_name=set_name, width=width, first=first, counts=counts)

    def line(self, step: int) -> dict[str, object]:
        """Return the content of a line of rewards.jsonl."""
        return {"step": step, "set": self.set_name, "width": self.width, "first": self.first, **self.counts}

    @property
    def bins(self) -> int:
        """Number of bins."""
        return max(map(len, self.counts.values()))

    @property
    def edges(self) -> list[float]:
        """Right edge of each bin."""
        return [(self.first + bin_index + 1) * self.width for bin_index in range(self.bins)]


class _Line(Record, extra="allow"):
    """A line of rewards.jsonl; its other keys are the names of the classes."""

    __pydantic_extra__: dict[str, Annotated[list[Count], Len(1, MAX_BINS)]]
    step: Count
    set: str
    width: Annotated[float, Ge(2.0**_MIN_EXPONENT), Le(2.0**64)]
    first: Annotated[int, Gt(-(2**63)), Lt(2**63)]


def read_rewards(file: Path, damaged: list[str] | None = None) -> dict[str, dict[int, RewardHistogram]]:
    """Read a file of rewards: name of the validation set -> step -> histogram.

    Damaged lines are skipped and described in ``damaged``, and a missing file has none.
    """
    sets: dict[str, dict[int, RewardHistogram]] = {}
    for line in read_lines_as(_Line, file, damaged):
        if counts := line.__pydantic_extra__:
            histogram = RewardHistogram(set_name=line.set, width=line.width, first=line.first, counts=counts)
            sets.setdefault(line.set, {})[line.step] = histogram
    return sets


@dataclass(frozen=True, kw_only=True)
class ExtremeRow:
    """Held-out row whose reward agrees most or least with its label at a validation; a line of extremes.jsonl."""

    step: Count
    set: str  # name of the validation set; empty for a single set without a name
    best: bool  # the reward agrees most, not least
    row: str  # file and line
    reward: Number  # for a pair: of the chosen answer minus that of the rejected one
    prompt: str  # as the model gets it
    answers: Mapping[str, str]  # class -> text


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
    logger.log_text(key="samples", columns=COLUMNS, data=[cells(sample) for sample in samples], step=step)


def log_to_mlflow(logger: Any, samples: Sequence[Sample], step: int) -> None:
    """Append the answers to a table, which is an artifact of the run; ``logger`` is Lightning's MLFlowLogger."""
    rows = [cells(sample) for sample in samples]
    table = {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
    logger.experiment.log_table(logger.run_id, table, artifact_file=_MLFLOW_TABLE)


def cells(sample: Sample) -> list[object]:
    """Return the row of a table with :data:`COLUMNS`."""
    values = asdict(sample)
    return [values[name] for name in COLUMNS]
