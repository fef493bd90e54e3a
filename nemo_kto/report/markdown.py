"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_kto.report.plots import Plot
from nemo_kto.report.text import number_text
from nemo_kto.utils.text import markdown_text


def markdown(content: Mapping[str, Any]) -> str:
    """Return the content of a report (see ``page.content_of``) as text, with the main values of each curve in a table."""
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {markdown_text(content['title'])}"
    yield f"\n{markdown_text(content['lead'])}"
    if content["notice"]:
        yield f"\n**{markdown_text(content['notice'])}**"
    if figures := content.get("figures"):
        yield from _table([["figure", "value", ""], *([each.label, each.value, each.detail] for each in figures)])
    for title, name in (("Final figures", "final_figures"), ("Settings that differ", "different")):
        if rows := content.get(name):
            yield f"\n## {title}"
            yield from _table(rows)
    for name, advice in content["advice_of"]:
        if advice:
            yield "\n## Advice" + (f" about {markdown_text(name)}" if len(content["advice_of"]) > 1 else "") + "\n"
        for item in advice:
            yield f"- **{markdown_text(item.title)}**: {markdown_text(item.reason)} {markdown_text(item.remedy)}"
    if content["plots"]:
        yield "\n## Curves"
        yield from _table([["curve", "first", "lowest", "highest", "last"], *_curves(content["plots"])])
    if answers := content.get("answers"):
        yield "\n## Answers"
        for item in answers:
            for role, text in item.prompt:
                yield "\n" + (f"{markdown_text(role)}: " if role else "") + f"**{markdown_text(text)}**"
            yield ""
            for name, answer in item.answers.items():
                yield f"- {name}: {markdown_text(answer)}"
    if data := content.get("data"):
        yield "\n## Data"
        yield from _table(data)
    if warnings := content.get("warnings"):
        yield "\n## Warnings\n"
        yield from (f"- {step}: {markdown_text(text)}" for step, text in warnings)
    if damaged := content["damaged"]:
        yield "\n## Left out\n"
        yield from (f"- {markdown_text(text)}" for text in damaged)
    for part in content["parts"]:
        yield f"\n## {part['title']}"
        for section in part["sections"]:
            if section["title"]:
                yield f"\n### {section['title']}"
            lines = section["lines"]
            yield from _table([["", ""], *map(list, lines.items())] if lines else section["rows"])
    yield f"\n{markdown_text(content['footer'])}"


def _curves(plots: Sequence[Plot]) -> Iterator[list[str]]:
    for plot in plots:
        for series in plot.series:
            curve = series.curve
            values = (curve.first, float(curve.values.min()), float(curve.values.max()), curve.last)
            yield [f"{plot.title}, {series.label}", *map(number_text, values)]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(markdown_text(cell) for cell in row)} |"
        if number == 0:
            yield f"|{'---|' * len(row)}"
