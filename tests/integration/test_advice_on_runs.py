"""Advice about real runs, good and bad ones: findings of a page do not contradict each other, and their links exist."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from docs.site.pages import DOCS
from nemo_kto.records.run_record import read_run
from nemo_kto.tools.report.advice import advice_for
from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows

TOO_FAST = ("destroyed", "probably too high", "fall together", "keeps falling")
# Titles that cannot stand on one page, and remedies that would undo each other.
CONTRADICTIONS = [
    *(("hardly changed", title) for title in (*TOO_FAST, "overfits", "has risen since")),
    *(("too short", title) for title in (*TOO_FAST, "overfits", "has risen since", "batch is small")),
    *itertools.combinations(TOO_FAST, 2),
    ("overfits", "too few rows"),
    ("a higher model.optim.lr", "a lower model.optim.lr"),
    ("train longer", "fewer epochs"),
]
# Words of each run -> parts of titles that it must have; None: any.
RUNS: dict[str, tuple[str, ...] | None] = {
    "kto steps=12 lr=1e-3 model.data.splits_string=null": None,
    "kto steps=12 lr=30": ("destroyed",),
    "kto steps=3 lr=1e-3": ("too short",),
    "kto steps=12 lr=1e-9": ("hardly changed",),
    "kto steps=20 lr=3e-2": None,
    "kto steps=12 lr=1e-2 batch=2 beta=2": None,
    "kto steps=12 lr=1e-2 model.kto.preference_loss=bco beta=0.01": None,
    "kto steps=12 lr=1e-3 model.data.seq_length=16": ("truncated",),
    "dpo steps=12 lr=1e-3 model.data.splits_string=null": None,
    "dpo steps=20 lr=3e-2 beta=1": None,
    "dpo steps=12 lr=1e-2 model.dpo.preference_loss=orpo": None,
    "dpo steps=12 lr=1 model.dpo.preference_loss=ipo": None,
}
QUICK = ("kto steps=12 lr=30",)


def anchors(page: str) -> set[str]:
    """The places of a page that a link may name; the page itself is the empty one."""
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {"", *(re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings)}


def check_advice(folder: Path, titles: tuple[str, ...] | None) -> None:
    """The page of a run has the expected findings, none of which contradicts another or links to nothing."""
    found = advice_for(read_run(folder))
    texts = [f"{advice.title}. {advice.remedy}" for advice in found]
    assert [pair for pair in CONTRADICTIONS if all(any(part in text for text in texts) for part in pair)] == [], texts
    assert [
        advice.page for advice in found if advice.page.partition("#")[2] not in anchors(advice.page.partition("#")[0])
    ] == []
    assert titles is None or [title for title in titles if not any(title in text for text in texts)] == [], texts


@pytest.mark.parametrize("words", [word if word in QUICK else pytest.param(word, marks=pytest.mark.slow) for word in RUNS])
def test_findings_of_a_run(words: str, tiny_llama: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "kto.jsonl", make_rows(200))
    write_rows(tmp_path / "dpo.jsonl", make_pairs(200))
    name, *settings = words.split()
    given = [f"{name}.jsonl", 'model.data.splits_string="80,20"', "batch=8", "hardware=cpu", "model.data.seq_length=128"]
    given += ["exp_manager.samples.count=0", "exp_manager.create_tensorboard_logger=false"]
    keys = {word.partition("=")[0] for word in settings}
    given = [word for word in given if word.partition("=")[0] not in keys]
    call = [*CLI, name, str(tiny_llama), *given, *settings, "exp_manager.explicit_log_dir=run", "export.enabled=false"]
    done = run(call, cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 0, done.stderr
    check_advice(tmp_path / "run", RUNS[words])


@pytest.mark.slow
def test_findings_of_a_resumed_run(tiny_llama: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "kto.jsonl", make_rows(200))
    for steps in (6, 12):
        words = ["kto.jsonl", "batch=8", "lr=1e-2", "hardware=cpu", f"steps={steps}", "exp_manager.explicit_log_dir=run"]
        done = run([*CLI, "kto", str(tiny_llama), *words], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
        assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run").step == 12
    check_advice(tmp_path / "run", None)
