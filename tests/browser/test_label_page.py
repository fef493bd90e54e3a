"""The page of `nemo-kto label --page` in a real browser: by keyboard and by touch, at two widths, in both schemes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.tools.rounds.answers import read_answers
from nemo_kto.tools.rounds.label_page import PageServer
from nemo_kto.tools.rounds.labelling import Labelling, pair_questions, single_questions
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds.conftest import read

pytestmark = pytest.mark.browser
LONG = "A lake is a body of water that is surrounded by land, and fed by rivers, rain and springs.\n\n" * 6
TEXTS = ("Water.", LONG, "<b>Bold</b> <script>document.title = 'run'</script>", "w" * 300)


@contextmanager
def serving(folder: Path, *, pairs: bool) -> Iterator[tuple[str, Path]]:
    """The address of the page of four answers, and the file of rows."""
    system = {"role": "system", "content": "Be brief."}
    prompt = [system, {"role": "user", "content": "What is a lake?"}]
    shared = {"prompt": prompt, "model": "m", "line": 1}
    rows = [{**shared, "answer": text, "index": index} for index, text in enumerate(TEXTS)]
    answers, out = read_answers(write_rows(folder / "answers.jsonl", rows)), folder / "rows.jsonl"
    questions = pair_questions(answers) if pairs else single_questions(answers)
    with (
        open_rows(out, option="--out") as file,
        PageServer(labelling=Labelling(questions=questions, file=file, about={})) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.address, out
        server.shutdown()
        thread.join()


@contextmanager
def opened(chromium: Browser, address: str, *, width: int, scheme: str) -> Iterator[Page]:
    """The page on a screen; nothing goes wrong, and nothing is asked of another machine."""
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    local = (address.split("?")[0], "data:")
    page.on("request", lambda request: None if request.url.startswith(local) else wrong.append(request.url))
    page.goto(address)
    yield page
    assert not wrong
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_thumbs(chromium: Browser, tmp_path: Path, width: int, scheme: str, screenshots: Path) -> None:
    with serving(tmp_path, pairs=False) as (address, out), opened(chromium, address, width=width, scheme=scheme) as page:
        for number, (key, text) in enumerate(zip("gbg", TEXTS, strict=False)):
            expect(page.locator("#count")).to_have_text(f"{number} of 4")
            expect(page.locator(".answer")).to_have_text(text)
            assert page.evaluate("document.documentElement.scrollWidth") == width, "it does not scroll sideways"
            page.screenshot(path=screenshots / f"label-{width}-{scheme}-{number}.png")
            page.keyboard.press(key)
        expect(page.locator("#count")).to_have_text("3 of 4")
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#count")).to_have_text("2 of 4")
        page.get_by_role("button", name="Bad").click()
        expect(page.locator("#count")).to_have_text("3 of 4")
        page.keyboard.press("s")
        expect(page.locator("#note")).to_contain_text("Every answer has been shown")
        assert [row["label"] for row in read(out)] == [True, False, False]
        assert page.title() == "nemo-kto label", "no answer runs as a script"
        luminance = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert (luminance > 128) == (scheme == "light")
        buttons = page.locator("button").all()
        assert min(button.bounding_box()["height"] for button in buttons) >= 44, "for a finger"  # type: ignore[index]
        page.keyboard.press("q")
        expect(page.locator("#note")).to_contain_text("The command has ended")


@pytest.mark.parametrize("width", [390, 1280])
def test_pairs(chromium: Browser, tmp_path: Path, width: int, screenshots: Path) -> None:
    with serving(tmp_path, pairs=True) as (address, out), opened(chromium, address, width=width, scheme="light") as page:
        expect(page.locator(".answer")).to_have_count(2)
        first, second = (each.bounding_box() for each in page.locator(".answer").all())
        assert first is not None
        assert second is not None
        assert (first["x"] == second["x"]) == (width == 390), "below each other on a telephone"
        page.screenshot(path=screenshots / f"label-pairs-{width}.png")
        shown = [text.split("\n")[0] for text in page.locator(".answer").all_inner_texts()]
        assert shown == ["First", "Second"]
        texts = [each.evaluate("each => each.lastChild.textContent") for each in page.locator(".answer").all()]
        page.keyboard.press("2")
        expect(page.locator("#count")).to_have_text("1 of 2")
        (row,) = read(out)
        assert [row["rejected"], row["chosen"]] == texts
        page.goto(address)
        expect(page.locator("#count")).to_have_text("1 of 2")
