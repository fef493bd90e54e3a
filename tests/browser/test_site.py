"""The documentation site in a real browser: everything fits the screen, and links to example files lead to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from docs.site.pages import DOCS, REPOSITORY

pytestmark = pytest.mark.browser
PAGES = ("index", "gallery/README", "scale/slurm", "start/from-trl", "reference/commands", "start/your-data")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sphinx.cmd.build import build_main

    folder = tmp_path_factory.mktemp("site")
    assert build_main(["--quiet", "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]) == 0
    return folder / "html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_screen(chromium: Browser, site: Path, width: int, scheme: str, screenshots: Path) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page, wide = context.new_page(), []
    for name in PAGES:
        page.goto((site / f"{name}.html").as_uri())
        page.screenshot(path=screenshots / f"{name.replace('/', '-')}-{width}-{scheme}.png", full_page=True)
        overflowing = "[...document.querySelectorAll('pre')].some(each => each.scrollWidth > each.clientWidth + 1)"
        if page.evaluate("document.documentElement.scrollWidth") > width or (width == 390 and page.evaluate(overflowing)):
            wide.append(name)
    assert wide == []
    context.close()


def test_links_to_example_files(chromium: Browser, site: Path) -> None:
    page = chromium.new_page()
    page.goto((site / "scale/slurm.html").as_uri())
    link = page.get_by_role("link", name="train.sbatch").first.get_attribute("href")
    assert link is not None
    assert (site / "scale" / link).read_text() == (REPOSITORY / "examples/slurm/train.sbatch").read_text()
    page.close()
