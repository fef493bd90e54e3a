"""Figures of the documentation: each is small, drawn by a script and used by a page; stored runs are those of the table."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from docs.figures import gallery, losses
from docs.figures.draw import FIGURES
from docs.figures.runs import DATA, RUNS
from docs.site import pages

DOCS = Path(__file__).resolve().parents[1] / "docs"
DRAWN = sorted((DOCS / "figures").glob("*.svg"))


def test_every_figure_has_a_script_and_a_page() -> None:
    used = {name for page in DOCS.rglob("*.md") for name in re.findall(r"figures/([\w-]+)\.svg", page.read_text())}
    assert {file.stem for file in DRAWN} == set(FIGURES) == used


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.stem)
def test_figures_are_small_and_have_no_background(file: Path) -> None:
    text = file.read_text()
    assert len(text) < 60_000
    assert "<dc:date>" not in text
    assert "#ffffff" not in text


def test_a_figure_is_drawn_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs.figures.style.HERE", tmp_path)
    assert FIGURES["dpo"]().read_text() == (DOCS / "figures" / "dpo.svg").read_text()


def test_slopes_are_those_of_the_formulas() -> None:
    margins = torch.tensor([-1.0, 0.0, 2.0])
    values, slopes = losses.loss_and_slope(lambda margin: losses.pair_loss("dpo", margin), margins)
    torch.testing.assert_close(values, -torch.sigmoid(margins).log())
    torch.testing.assert_close(slopes, -torch.sigmoid(-margins))


@pytest.mark.parametrize("name", RUNS)
def test_the_stored_run_is_that_of_the_table(name: str) -> None:
    stored = json.loads((DATA / f"{name}.json").read_text())
    assert stored["command"] == shlex.join(RUNS[name].command(f"runs/{name}"))
    assert stored["train"]["step"] == list(range(1, RUNS[name].steps + 1))
    assert stored["val"]["step"][-1] == RUNS[name].steps


def test_the_gallery_shows_the_stored_runs() -> None:
    shown = (DOCS / gallery.PAGE).read_text()
    assert shown.startswith(gallery.text()), "python -m docs.figures.gallery"
    assert shown == pages.with_next(gallery.PAGE)
