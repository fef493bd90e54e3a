"""A headless Chromium for the tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
# Nothing that asks the network by itself; there is no sandbox for root.
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
MORE_FLAGS = "--disable-component-update --disable-sync"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium (apt-get install chromium), nor a path in CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS.split(), *MORE_FLAGS.split()])
        yield browser
        browser.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """The folder in which pictures of pages are kept: SCREENSHOTS, or one of pytest's."""
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
