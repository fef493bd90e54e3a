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
MARKDOWN = """# A lake
It is **still** *water*, ![x](http://127.0.0.2/x.png) as `is_lake(<b>)` finds, 2 * 3 * 4:

2. deep
  - *cold*
> calm

```is_deep()``` on a line
```python
def is_lake(place):
    return place.water and not place.flows, "a line of code that is wider than a telephone, which scrolls by itself"
```not the end
```
| a | b |
|---|---|
<img src="http://127.0.0.2/x.png">"""
TEXTS = ("Water.", LONG, "<b>Bold</b> <script>document.title = 'run'</script>", MARKDOWN, "w" * 300)

OVERFLOWING = """
[...document.querySelectorAll("button")].filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)
"""


@contextmanager
def serving(folder: Path, *, pairs: bool) -> Iterator[tuple[str, Path]]:
    """The address of the page of four answers, and the file of rows."""
    system = {"role": "system", "content": "Be brief."}
    prompt = [system, {"role": "user", "content": "What is a lake?"}]
    shared = {"prompt": prompt, "model": "m", "line": 1}
    rows = [{**shared, "answer": text, "index": index, "finish": "stop"} for index, text in enumerate(TEXTS)]
    rows[1]["finish"] = "length"
    answers, out = read_answers(write_rows(folder / "answers.jsonl", rows)), folder / "rows.jsonl"
    questions = pair_questions(answers) if pairs else single_questions(answers)
    with (
        open_rows(out, option="--out") as file,
        PageServer(labelling=Labelling(questions=questions, file=file, about={}), next_step="nemo-kto kto m f") as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.address, out
        finally:
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


def assert_rendered(page: Page) -> None:
    """Markdown has its form, and no markup of an answer becomes an element."""
    for selector, text in {
        "strong": "still", "em >> nth=0": "water",
        "code >> nth=0": "is_lake(<b>)", "code >> nth=1": "is_deep()", ".heading": "A lake", ".quote": "calm",
        ".item >> nth=0": "2. deep", ".item >> nth=1": "\N{BULLET} cold",
    }.items():  # fmt: skip
        expect(page.locator(f".answer {selector}")).to_have_text(text, use_inner_text=True)
    blocks = page.locator(".answer .code").all_text_contents()
    assert [block.split("\n")[0] for block in blocks] == ["def is_lake(place):", "| a | b |"]
    assert blocks[0].endswith("```not the end")
    for shown in ("![x](http://127.0.0.2/x.png)", "2 * 3 * 4", '<img src="http://127.0.0.2/x.png">'):
        expect(page.locator(".answer .text")).to_contain_text(shown)
    assert page.locator("main img, main a, main b, main script, main table").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_thumbs(chromium: Browser, tmp_path: Path, width: int, scheme: str, screenshots: Path) -> None:
    with serving(tmp_path, pairs=False) as (address, out), opened(chromium, address, width=width, scheme=scheme) as page:
        for number, (key, text) in enumerate(zip("gbg", TEXTS, strict=False)):
            expect(page.locator("#count")).to_have_text(f"{number} of 5")
            expect(page.locator(".answer .text")).to_have_text(text, use_inner_text=True)
            expect(page.locator(".cut")).to_have_count(int(number == 1))
            assert page.evaluate("document.documentElement.scrollWidth") == width, "it does not scroll sideways"
            page.screenshot(path=screenshots / f"label-{width}-{scheme}-{number}.png")
            page.keyboard.press(key)
        expect(page.locator("#count")).to_have_text("3 of 5")
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#count")).to_have_text("2 of 5")
        page.get_by_role("button", name="Bad").click()
        expect(page.locator("#count")).to_have_text("3 of 5")
        expect(page.locator("#tally")).to_have_text("1 good, 2 bad")
        assert_rendered(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERFLOWING) == []
        page.screenshot(path=screenshots / f"label-{width}-{scheme}-markdown.png", full_page=True)
        page.keyboard.press("m")
        expect(page.locator(".answer .text > *")).to_have_count(0)
        assert page.locator(".answer .text").evaluate("each => each.textContent") == MARKDOWN
        page.keyboard.press("s")
        expect(page.locator("#count")).to_have_text("4 of 5")
        page.keyboard.press("s")
        expect(page.locator("#note")).to_contain_text("Every answer has been shown")
        expect(page.locator("#note code")).to_have_text("nemo-kto kto m f")
        page.screenshot(path=screenshots / f"label-{width}-{scheme}-end.png")
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
        assert page.evaluate(OVERFLOWING) == []
        page.screenshot(path=screenshots / f"label-pairs-{width}.png")
        shown = [text.split("\n")[0] for text in page.locator(".answer").all_inner_texts()]
        assert shown == ["First", "Second"]
        page.keyboard.press("m")
        texts = page.locator(".answer .text").all_text_contents()
        page.keyboard.press("2")
        expect(page.locator("#count")).to_have_text("1 of 2")
        (row,) = read(out)
        assert [row["rejected"], row["chosen"]] == texts
        page.goto(address)
        expect(page.locator("#count")).to_have_text("1 of 2")
        page.get_by_role("button", name="Both bad").click()
        expect(page.locator("#tally")).to_have_text("1 preference, 1 both bad")
        page.keyboard.press("u")
        expect(page.locator("#tally")).to_have_text("1 preference")
        page.keyboard.press("0")
        expect(page.locator("#tally")).to_have_text("1 preference, 1 tie")
