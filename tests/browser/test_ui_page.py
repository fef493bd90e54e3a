"""`nemo-kto ui` in a real browser: a run is started and stopped, a model answers; at two widths, in both schemes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.helpers.commands import CLI, environment
from tests.helpers.tiny_models import make_rows, write_rows

# Not imported, which takes seconds: the server does.
pytestmark = [pytest.mark.browser, pytest.mark.skipif(find_spec("gradio") is None, reason="needs the extra ui")]
MINUTES = 60_000  # milliseconds each
SETTINGS = "hardware=cpu model.data.seq_length=64 batch=8 epochs=200 export.report=false"


@pytest.fixture(scope="module")
def address(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of the page, and its working directory with a model and a file of rows."""
    folder = tmp_path_factory.mktemp("ui")
    shutil.copytree(tiny_llama, folder / "tiny")
    generation = json.loads((folder / "tiny/generation_config.json").read_text())
    (folder / "tiny/generation_config.json").write_text(json.dumps({**generation, "max_new_tokens": 4}))
    rows = [{"question": row.pop("prompt"), **row} for row in make_rows(40)]
    write_rows(folder / "feedback.jsonl", rows)
    words = [*CLI, "ui"]
    env = {**environment(), "PYTHONUNBUFFERED": "1", "NEMO_KTO_FORCE_CPU": "1"}
    with subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[1], folder
        server.send_signal(signal.SIGINT)
        assert server.wait(180) == 0


@contextmanager
def opened(chromium: Browser, address: str, *, width: int, scheme: str) -> Iterator[Page]:
    """The page on a screen; nothing goes wrong, and nothing is asked of another machine."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    local = (address.split("?")[0], "data:", "blob:")
    page.on("request", lambda request: None if request.url.startswith(local) else wrong.append(request.url))
    page.goto(address)
    page.get_by_label("Data file").wait_for(timeout=MINUTES)
    yield page
    assert not wrong
    context.close()


def choose(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_run_from_the_page(chromium: Browser, address: tuple[str, Path], screenshots: Path) -> None:
    url, folder = address
    with opened(chromium, url, width=1280, scheme="light") as page:
        choose(page, "Data file", "feedback.jsonl")
        choose(page, "Model", "tiny")
        choose(page, "Column of prompt", "question")
        page.get_by_label("Further settings").fill(SETTINGS)
        page.keyboard.press("Tab")
        command = (
            "nemo-kto kto tiny feedback.jsonl 'model.data.fields={prompt:question}' exp_manager.explicit_log_dir=results/"
        )
        expect(page.locator(".cm-content")).to_contain_text(f"{command}my_run {SETTINGS}", timeout=MINUTES)
        page.get_by_role("button", name="Show rows").click()
        expect(page.get_by_label("Rows, check and plan")).to_have_value(re.compile("KL example"), timeout=2 * MINUTES)
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_text(re.compile(r"^results/my_run: running, step [1-9]"))).to_be_visible(timeout=3 * MINUTES)
        expect(page.get_by_alt_text("curves of results/my_run")).to_be_visible(timeout=MINUTES)
        page.screenshot(path=screenshots / "ui-run.png", full_page=True)
        page.get_by_role("button", name="Stop").click()
        state = "results/my_run: stopped, with a checkpoint"
        expect(page.get_by_text(state)).to_be_visible(timeout=2 * MINUTES)
        assert json.loads((folder / "results/my_run/run.json").read_text())["state"] == "stopped"
        page.get_by_role("tab", name="Chat").click()
        page.get_by_label("Run or model").fill("tiny")
        page.get_by_role("textbox", name="Prompt").fill("juniper fjord")
        page.keyboard.press("Enter")
        expect(page.locator(".message.bot")).to_be_visible(timeout=5 * MINUTES)
        page.screenshot(path=screenshots / "ui-chat.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_widths_and_schemes(
    chromium: Browser, address: tuple[str, Path], width: int, scheme: str, screenshots: Path
) -> None:
    with opened(chromium, address[0], width=width, scheme=scheme) as page:
        page.get_by_role("button", name="Check").click()
        expect(page.get_by_label("Rows, check and plan")).to_have_value(re.compile("model, data must be chosen"))
        assert page.evaluate("document.documentElement.scrollWidth") == width, "it does not scroll sideways"
        luminance = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert (luminance > 128) == (scheme == "light")
        page.screenshot(path=screenshots / f"ui-{width}-{scheme}.png", full_page=True)


def test_without_the_token(chromium: Browser, address: tuple[str, Path]) -> None:
    context = chromium.new_context()
    reply = context.new_page().goto(address[0].split("?")[0])
    assert reply is not None
    assert (reply.status, reply.text()) == (403, "open the address that nemo-kto ui has printed\n")
    context.close()
