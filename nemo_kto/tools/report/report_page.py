"""The report as an HTML page, which needs no other file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from nemo_kto import __version__
from nemo_kto.records.plots import METRICS, Plot, look, plots_of, step_range
from nemo_kto.records.run_record import RunRecord
from nemo_kto.tools.report import facts
from nemo_kto.tools.report.advice import advice_for, different_data
from nemo_kto.tools.report.comparison import compared_plots, differing_settings, final_figures, unique_names
from nemo_kto.tools.report.histograms import Histogram, length_histograms, reward_histograms
from nemo_kto.tools.report.svg import draw, draw_histogram
from nemo_kto.utils.files import publish_file
from nemo_kto.utils.locks import one_writer
from nemo_kto.utils.text import html_text, value_text

_USE = ("results/chat.md", "results/serve.md")  # pages about the commands for a finished model
_MAX_ANSWERS = 50  # prompts that are shown


def write_report(runs: Sequence[RunRecord], out: Path, *, refresh: float | None = None) -> None:
    """Write the report of one run, or the comparison of several, as HTML to ``out``.

    A browser loads the page again after ``refresh`` seconds; None: it does not.
    """
    page = html(content_of(runs) | {"refresh": None if refresh is None else round(refresh)})
    with one_writer(out, private=False), publish_file(out, durable=False) as writing:
        writing.write_text(page, encoding="utf-8")


def content_of(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return everything that a report shows, by the names in the templates; drawings are plots that are not drawn yet."""
    named = unique_names(runs)
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    shared = {"footer": f"Written by nemo-kto {__version__} on {written}."}
    if len(named) > 1:
        return shared | _comparison(named)
    return shared | _single(runs[0])


def _single(run: RunRecord) -> dict[str, Any]:
    found = advice_for(run)
    plots = plots_of(run)
    return {
        "title": run.name,
        "state": run.state.word,
        "lead": facts.subtitle(run),
        "notice": facts.state_text(run),
        "figures": facts.headline(run),
        "advice_of": [(run.name, found)],
        "is_sound": not found and run.step > 0,
        "plots": plots,
        "curves_note": _curves_note(plots),
        "rewards": [(_rewards_title(run, name), histograms) for name, histograms in reward_histograms(run).items()],
        "extremes": [
            {"title": title, "folded": best, "rows": rows}
            for title, best in (
                ("Rewards that contradict the label most: is it wrong?", False),
                ("Rewards that agree most", True),
            )
            if (rows := facts.extreme_rows(run, best=best))
        ],
        "answers": [answers for answers, _ in zip(facts.answers(run), range(_MAX_ANSWERS), strict=False)],
        "data": facts.data_table(run),
        "lengths": length_histograms(run, "train"),
        "warnings": facts.warning_lines(run),
        "damaged": run.damaged,
        "parts": [{"title": title, "sections": sections} for title, sections in _parts(run) if sections],
    }


def _rewards_title(run: RunRecord, set_name: str) -> str:
    """Return the heading of the histograms of a validation set, which may begin after step 0."""
    title = f"Rewards of validation {set_name}".strip()
    steps = run.rewards[set_name]
    if min(steps) == 0:
        return f"{title}, before and after"
    return title + (", at its first and last validation" if len(steps) > 1 else "")


def _comparison(runs: Mapping[str, RunRecord]) -> dict[str, Any]:
    states = [text for name, run in runs.items() if (text := facts.state_text(run)) and (text := f"{name}: {text}")]
    plots = compared_plots(runs)
    return {
        "title": f"Comparison of {len(runs)} runs",
        "lead": "; ".join(dict.fromkeys(map(facts.subtitle, runs.values()))),
        "notice": "\n".join(states),
        "final_figures": final_figures(runs),
        "different": rows if len(rows := differing_settings(runs)) > 1 else [],
        "advice_of": [
            ("the comparison", [advice for advice in [different_data(runs)] if advice is not None]),
            *((name, advice_for(run)) for name, run in runs.items()),
        ],
        "plots": plots,
        "curves_note": _curves_note(plots),
        "damaged": [f"{name}: {text}" for name, run in runs.items() for text in run.damaged],
        "parts": [],
    }


def _curves_note(plots: Sequence[Plot]) -> str:
    if not plots:
        return ""
    note = "Horizontal axis: optimizer step. Dots are validations."
    averaged = [series for plot in plots for series in plot.series if series.window > 1]
    if averaged:
        note += f" Lines are means over a window of up to {max(series.window for series in averaged)} logged steps"
        note += ", above the raw values." if any(series.kind == "smoothed" for series in averaged) else "."
    if any(plot.has_bands for plot in plots):
        note += " Bands are one standard deviation of the logged values within the window."
    return note


def _parts(run: RunRecord) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    own = {key: value_text(value) for key, value in run.settings.items()}
    others = {key: value_text(value) for key, value in run.config.items() if key not in own}
    settings = [
        {"title": f"The {len(own)} keys that were set", "folded": True, "lines": own},
        {"title": f"The other {len(others)} keys" if own else f"All {len(others)} keys", "folded": True, "lines": others},
    ]
    win_rates, checkpoints = (
        [{"title": "", "folded": False, "lines": None, "rows": table}] if table else []
        for table in (facts.comparison_table(run), facts.checkpoint_table(run))
    )
    if steps := facts.next_steps(run):
        yield "Use the model", [{"title": "", "folded": False, "lines": steps, "pages": _USE}]
    yield "Win rates", win_rates
    yield "Settings", [section for section in settings if section["lines"]]
    yield "Run", [{"title": "", "folded": False, "lines": summary}] if (summary := run.run.get("summary")) else []
    yield "Checkpoints", checkpoints
    if origin := facts.provenance(run):
        yield "Versions and hashes", [{"title": "Packages, and content hashes", "folded": True, "lines": origin}]


def html(content: Mapping[str, Any]) -> str:
    """Return the content of a report as a page that loads nothing and runs no script."""
    from markupsafe import Markup

    steps = step_range(content["plots"])

    def of_plot(plot: Plot) -> dict[str, Any]:
        legend = [(*look(series), series.label) for series in plot.series if series.label]
        svg = Markup(draw(plot, steps))  # nosec B704  # our own
        return {"title": plot.title, "legend": legend, "note": plot.note, "page": plot.page, "svg": svg}

    def of_histogram(histogram: Histogram, page: str) -> dict[str, Any]:
        legend = [(colour, 0, name) for colour, name in enumerate(histogram.counts) if name]
        svg = Markup(draw_histogram(histogram))  # nosec B704
        note = "The last bar counts everything longer." if histogram.last_is_open else ""
        return {"title": histogram.title, "legend": legend, "note": note, "page": page, "svg": svg}

    rewards = [
        {"title": name, "drawn": [of_histogram(each, METRICS) for each in histograms]}
        for name, histograms in content.get("rewards", ())
    ]
    drawings = {
        "drawn": [of_plot(plot) for plot in content["plots"] if not plot.technical],
        "technical": [of_plot(plot) for plot in content["plots"] if plot.technical],
        "rewards": rewards,
        "lengths": [of_histogram(each, "guides/data.md") for each in content.get("lengths", ())],
    }
    return _render({**content, **drawings, "docs": _docs_address()})


def _docs_address() -> str:
    """Return the address of the folder docs/ of the repository that the package was built from; empty if it has none."""
    try:
        urls = dict(url.split(", ", 1) for url in metadata("nemo-kto").get_all("Project-URL", []))
    except PackageNotFoundError:
        return ""
    return f"{urls['Repository']}/blob/main/docs/" if "Repository" in urls else ""


def _render(content: Mapping[str, Any]) -> str:
    """Fill in the template; every text is escaped that is not Markup, such as a drawing or a macro's output."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        return Markup(html_text(value)) if type(value) is str else value  # nosec B704  # escaped

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=finalize
    )
    text = resources.files(__package__).joinpath("report_page.html").read_text(encoding="utf-8")
    absent = dict.fromkeys(
        ("state", "figures", "final_figures", "different", "is_sound", "extremes", "answers", "data", "warnings")
    )
    return environment.from_string(text).render({**absent, **content}) + "\n"
