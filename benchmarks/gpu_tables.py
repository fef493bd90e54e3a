"""What benchmarks/gpu.py found: figures, tables, what was aimed at, and whether both trainers did the same work."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_models import Size, row_lengths

# Phases of a step that do not overlap; "reference" holds "reference_swap".
_PHASES = ("data", "reference", "kl", "forward_backward", "optimizer")
_SHOWN = {
    "data": "rows, KL examples",
    "reference": "reference, without its swap",
    "reference_swap": "swap of the weights",
    "kl": "KL examples under the policy",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "rest": "the rest",
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A trainer and its settings.

    Attributes:
        name: for the table.
        ours: it is nemo_kto.
        evaluates: it evaluates the reference in each step, which is work that counts; else that is done before.
        settings: what its program is given besides the model and the rows.
    """

    name: str
    ours: bool
    evaluates: bool
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Figures:
    """What the runs of a contender gave; ``wrong`` says why there are none."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    wrong: str | None = None

    def steps(self, name: str) -> list[Any]:
        """A figure of every step that counts."""
        return [value for run in self.runs for value in run[name][1:]]

    @property
    def seconds(self) -> float:
        """Of a step: the median."""
        return statistics.median(self.steps("seconds"))

    @property
    def tokens_per_second(self) -> float:
        """Of a step at the median."""
        return statistics.median(self.steps("tokens")) / self.seconds

    @property
    def peak(self) -> float:
        """GB that were held at most."""
        return max(run["peak_bytes"] for run in self.runs) / 1e9

    def share(self, phase: str) -> float:
        """Of the time of the steps that count."""
        return sum(step.get(phase, 0.0) for step in self.steps("phases")) / sum(self.steps("seconds"))

    def phase_shares(self) -> dict[str, float]:
        """Of all phases, and of the rest; together they are 1."""
        shares = {phase: self.share(phase) for phase in _PHASES}
        rest = 1 - sum(shares.values())
        swap = self.share("reference_swap")
        return {**shares, "reference": shares["reference"] - swap, "reference_swap": swap, "rest": rest}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The runs on one model; ``tried`` are TRL's settings, of which the best is among the ``results``."""

    size: Size
    results: list[tuple[Contender, Figures]]
    tried: list[tuple[Contender, Figures]]

    def of(self, *, ours: bool, evaluates: bool) -> Figures | None:
        """The figures of a contender; None where it failed or had no time."""
        found = [figures for one, figures in self.results if (one.ours, one.evaluates) == (ours, evaluates)]
        return found[0] if found and found[0].runs else None

    def mfu(self, contender: Contender, figures: Figures) -> float | None:
        """Of a contender, by the work that nemo_kto counts for the same step: what a trainer does besides does not count."""
        counted = self.of(ours=True, evaluates=contender.evaluates)
        if counted is None or not (peak := counted.runs[0]["peak_flops"]):
            return None
        return statistics.median(counted.steps("flops")) / figures.seconds / peak


def report(found: Found) -> list[str]:
    """The tables of a model, as Markdown."""
    size, base = found.size, found.of(ours=False, evaluates=True)
    tokens = sum(row_lengths(size.rows, size.longest))
    repetitions = min((len(figures.runs) for _, figures in found.results), default=0)
    lines = [
        f"### {size.name}",
        "",
        f"{size.rows} rows of {size.longest // 32} to {size.longest} tokens, {tokens} in all, and as many of KL examples. "
        f"Medians of {repetitions} repetitions or more. {_layers(found)}",
        "",
        "| trainer | tokens/s | times TRL's | s a step | MFU | peak memory | of TRL's |",
        "|---|---|---|---|---|---|---|",
    ]
    for contender, figures in found.results:
        if not figures.runs:
            lines.append(f"| {contender.name} | {figures.wrong or 'no time was left'} | | | | | |")
            continue
        seconds, mfu = figures.steps("seconds"), found.mfu(contender, figures)
        times = "" if base is None else f"{figures.tokens_per_second / base.tokens_per_second:.2f}"
        memory = "" if base is None else f"{figures.peak / base.peak:.2f}"
        lines.append(
            f"| {contender.name} | {figures.tokens_per_second:.0f} | {times} "
            f"| {figures.seconds:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {'' if mfu is None else f'{mfu:.1%}'} "
            f"| {figures.peak:.2f} GB | {memory} |"
        )
    return [*lines, "", *_breakdown(found), "", *_tried(found), "", *_goal_lines(found)]


def _layers(found: Found) -> str:
    engine = {run["engine"] for one, figures in found.results if one.ours for run in figures.runs}
    return {(True,): "Layers of Transformer Engine.", (False,): "No layers of Transformer Engine."}.get((*engine,), "")


def _breakdown(found: Found) -> list[str]:
    columns = {one.name: figures.phase_shares() for one, figures in found.results if one.ours and figures.runs}
    if not columns:
        return ["No run of nemo_kto worked."]
    lines = ["| share of a step | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for phase, text in _SHOWN.items():
        lines.append(f"| {text} | " + " | ".join(f"{shares[phase]:.1%}" for shares in columns.values()) + " |")
    return lines


def _tried(found: Found) -> list[str]:
    tried = [(one, figures) for one, figures in found.tried if figures.runs or figures.wrong]
    told = (f"{one.name}: {f'{figures.seconds:.2f} s' if figures.runs else figures.wrong}" for one, figures in tried)
    return [f"Tried with one step: {'; '.join(told)}."] if tried else []


def goals(found: Found) -> dict[str, tuple[float | None, float]]:
    """What is aimed at, by its name: what was found, and the goal. Goals say themselves which way."""
    live, theirs = found.of(ours=True, evaluates=True), found.of(ours=False, evaluates=True)
    both = [[f.tokens_per_second for one, f in found.results if one.ours == ours and f.runs] for ours in (True, False)]
    speed = max(both[0]) / max(both[1]) if all(both) else None
    result: dict[str, tuple[float | None, float]] = {"tokens a second, best against best of TRL, at least": (speed, 2.0)}
    memory = live.peak / theirs.peak if live and theirs else None
    result["peak memory, of TRL's, at most"] = (memory, 0.5)
    if not found.size.lora:
        contenders = [one for one, _ in found.results if one.ours and one.evaluates]
        result["MFU, at least"] = (found.mfu(contenders[0], live) if live else None, 0.45)
        result["swap, of a step, at most"] = (live.share("reference_swap") if live else None, 0.03)
    return result


def _goal_lines(found: Found) -> list[str]:
    lines = ["| goal | | found |", "|---|---|---|"]
    for name, (value, goal) in goals(found).items():
        met = "" if value is None else " met" if (value <= goal if "at most" in name else value >= goal) else " **missed**"
        lines.append(f"| {name} | {goal:g} | {'not known' if value is None else f'{value:.3g},'}{met} |")
    return lines


def inconsistent(found: Found, *, tolerance: float) -> list[str]:
    """What shows that the trainers did not do the same work, or that a run did not work."""
    wrong = [f"{one.name}: {figures.wrong}" for one, figures in found.results if figures.wrong]
    worked = [(one, figures) for one, figures in found.results if figures.runs]
    tokens = {one.name: {int(count) for run in figures.runs for count in run["tokens"]} for one, figures in worked}
    if len(set().union(*tokens.values())) > 1:
        wrong.append(f"the tokens of a step must be the same everywhere, got {tokens}")
    first = {one.name: figures.runs[0]["losses"][0] for one, figures in worked}
    if first and max(first.values()) - min(first.values()) > tolerance:
        wrong.append(f"the losses of the first step must agree to {tolerance:g}, got {first}")
    return wrong
