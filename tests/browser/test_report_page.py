"""Reports in a real browser: nothing fails, nothing is asked of a network, and everything fits the screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from nemo_kto.records.run_record import read_run
from nemo_kto.tools.report.report_page import write_report
from tests.helpers.run_folders import RECORDED, data_of, healthy, write_extras, write_run

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280)
# Labels of a drawing that leave its card, or overlap another one.
MISPLACED = """
[...document.querySelectorAll('figure')].flatMap(figure => {
    const card = figure.getBoundingClientRect();
    const labels = [...figure.querySelectorAll('svg text')].map(
        each => ({text: each.textContent, ...each.getBoundingClientRect().toJSON()}));
    const overlap = (one, other) => one.left < other.right && other.left < one.right
        && one.top + 3 < other.bottom && other.top + 3 < one.bottom;
    return labels.filter((one, place) => one.left < card.left + 1 || one.right > card.right - 1
        || labels.slice(place + 1).some(other => overlap(one, other))
    ).map(one => figure.querySelector('h3').textContent + ': ' + one.text);
})
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with everything, a real run with advice that failed, and a comparison of three."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_extras(write_run(folder / "complete", healthy(), data=data_of(cut=30))),
        write_run(
            folder / "failed", RECORDED / "bad.jsonl", run={"state": "failed", "text": "OutOfMemoryError: " + "x" * 300}
        ),
        write_run(folder / "a_run_with_a_name_that_is_longer_than_a_telephone_is_wide", RECORDED / "good.jsonl"),
    ]
    records = [read_run(run) for run in runs]
    made = {"complete": records[:1], "failed": records[1:2], "compared": records}
    for name, shown in made.items():
        write_report(shown, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture(params=["complete", "failed", "compared"])
def page_file(request: pytest.FixtureRequest, pages: dict[str, Path]) -> Path:
    return pages[request.param]


def opened(chromium: Browser, file: Path, *, width: int, scheme: str) -> Iterator[tuple[Page, list[str]]]:
    """The page on a screen, and what went wrong: errors, messages on the console, and requests other than for the page."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("request", lambda request: None if request.url == file.as_uri() else wrong.append(f"request: {request.url}"))
    page.goto(file.as_uri())
    yield page, wrong
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_on_a_screen(chromium: Browser, page_file: Path, width: int, scheme: str, screenshots: Path) -> None:
    for page, wrong in opened(chromium, page_file, width=width, scheme=scheme):
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width, "the page does not scroll sideways"
        page.screenshot(path=screenshots / f"{page_file.stem}-{width}-{scheme}.png", full_page=True)
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect().height))"
        )
        assert smallest >= 9, "labels of axes can be read"
        assert page.evaluate(MISPLACED) == []
        background, line = page.evaluate(
            "[document.body, document.querySelector('svg path[style*=series-0]')].map("
            "each => getComputedStyle(each)[each.tagName == 'BODY' ? 'backgroundColor' : 'stroke'])"
        )
        expected = {"light": ("rgb(247, 248, 250)", "rgb(47, 111, 222)"), "dark": ("rgb(17, 20, 24)", "rgb(121, 167, 255)")}
        assert (background, line) == expected[scheme]
        assert wrong == []


def test_a_printed_page_is_light_and_complete(chromium: Browser, pages: dict[str, Path], screenshots: Path) -> None:
    for page, wrong in opened(chromium, pages["complete"], width=1280, scheme="dark"):
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 33, 39)"
        page.pdf(path=screenshots / "complete.pdf", format="A4")
        assert (screenshots / "complete.pdf").stat().st_size > 20_000
        assert wrong == []
