"""Write the page of the gallery from the table of runs and their stored metrics: docs/gallery/README.md.

python -m docs.figures.gallery
"""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

from docs.figures.curves import read
from docs.figures.runs import RUNS, Configuration
from docs.site import pages

PAGE = "gallery/README.md"
HEAD = """\
# Gallery

Configurations to copy, with their curves: real runs of {count} steps of SmolLM2-135M-Instruct, or a tiny mixture of
experts, on short film reviews labelled good or bad. They show that a configuration works, not which algorithm is best: the
data is small, so the runs are short and the learning rates high. For your own data begin with those of [What to
set](../guides/settings.md).

The files are those of the [quickstart](../start/README.md#quickstart):

```bash needs=network
python examples/quickstart/prepare.py           # prints the folders of the model and of the rows
python examples/quickstart/prepare.py --pairs
```

The first run is

```bash needs=time by=docs/figures/runs.py
{command}
```

The others have its keys, with `dpo` instead of `kto` in their names and the files `pairs.jsonl` and
`pairs_validation.jsonl` for pairs, and those that are shown.

{table}

Loss, margin (mean reward of the better class minus that of the other) and accuracy of pairs are those of 64 validation rows
or pairs, before training and after the last step. The CPU time is that of the whole run in bf16 on two cores of an AMD EPYC
with AVX-512. `python -m docs.figures.runs FOLDER` repeats all runs, `python -m docs.figures.draw` draws the figures.
"""
SECTION = """\
## {title}

{about}
{keys}
![Loss and rewards of the run: {title}](../figures/run-{name}.svg)
"""


def text() -> str:
    """The page without its link to the next one."""
    shown = {name: run for name, run in RUNS.items() if run.in_gallery}
    counts = sorted({run.steps for run in shown.values()})
    first = next(iter(shown.values()))
    words = [shlex.quote(word) for word in first.words()]
    command = " \\\n  ".join((f"nemo-kto {first.algorithm} MODEL", *grouped(words)))
    count = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    head = HEAD.format(count=count, command=command, table=table(shown))
    return "\n".join([head, *(section(name, run) for name, run in shown.items())])


def table(runs: dict[str, Configuration]) -> str:
    """One line for each run: the validation figures before and after, CPU time."""
    lines = ["| configuration | loss | margin | accuracy of pairs | CPU time |", "|---|---|---|---|---|"]
    for name, run in runs.items():
        stored = read(name)
        figures = (change(stored, "loss", 3), change(stored, "rewards_margin", 2), change(stored, "acc", 2))
        lines.append(f"| {' | '.join((run.title, *figures, minutes(stored['cpu_seconds'])))} |")
    return "\n".join(lines)


def change(stored: dict[str, Any], metric: str, digits: int) -> str:
    """First and last value of a validation metric; empty where it is not logged."""
    values = stored["val"].get(metric)
    return f"{values[0]:.{digits}f} to {values[-1]:.{digits}f}".replace("-0.00 ", "0.00 ") if values else ""


def minutes(seconds: float) -> str:
    """A time in minutes."""
    return f"{seconds / 60:.1f} min"


def section(name: str, run: Configuration) -> str:
    """Heading, keys and curves of a run."""
    own = [f"{key}={value}" for key, value in run.keys.items() if RUNS["kto"].keys.get(key) != value]
    keys = "\n".join(("", f"```text\n{' '.join(own)}\n```", "")) if own else ""
    return SECTION.format(title=run.title, about=textwrap.fill(run.about, 128), keys=keys, name=name)


def grouped(words: list[str], width: int = 108) -> list[str]:
    """Words joined into lines that are not longer than ``width``."""
    lines = [words[0]]
    for number, word in enumerate(words[1:]):
        fits = number and len(lines[-1]) + len(word) < width
        lines[-1:] = [f"{lines[-1]} {word}"] if fits else [lines[-1], word]
    return lines


if __name__ == "__main__":
    (pages.DOCS / PAGE).write_text(text(), encoding="utf-8")
    (pages.DOCS / PAGE).write_text(pages.with_next(PAGE), encoding="utf-8")
