"""Advice: each rule on curves that it is about, and silence about a run that is well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.site.pages import DOCS
from nemo_kto.records.run_record import read_run
from nemo_kto.tools.report.advice import RULES, advice_for
from nemo_kto.utils.text import MINUS
from tests.helpers.run_folders import RECORDED, changed, data_of, healthy, write_run

Lines = list[dict[str, Any]]


def advice_of(folder: Path, lines: Lines | Path, **options: Any) -> dict[str, str]:
    """Title of each advice, without the words that name classes -> all of its text."""
    found = advice_for(read_run(write_run(folder / "run", lines, **options)))
    return {advice.title: f"{advice.reason} {advice.remedy}" for advice in found}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("steps", [12, 2000])
def test_a_healthy_run_gets_no_advice(tmp_path: Path, seed: int, steps: int) -> None:
    assert advice_of(tmp_path, healthy(steps, every=max(1, steps // 10), seed=seed), data=data_of()) == {}


def test_a_real_run_that_learned_gets_no_advice(tmp_path: Path) -> None:
    assert advice_of(tmp_path, RECORDED / "good.jsonl", model__kto__ref_policy_kl_penalty=0.1, data=data_of()) == {}


LOGPS = ("logps_chosen_mean", "logps_rejected_mean", "val_logps_chosen_mean", "val_logps_rejected_mean")


def noise(scale: float) -> Callable[[int], float]:
    return lambda step: float(np.random.default_rng(step).normal() * scale)


# Words of the title -> the metrics that differ from those of a healthy run, options of its folder, and figures in the text.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "learning rate": ({"loss": lambda step: 0.5 + step / 400}, {"model__optim__lr": 1e-4}, ["0.95", "0.5", "2e-05"]),
    "learning rate is probably": (
        {"grad_norm": lambda step: {1: 150.0, 50: 80.0, 90: 90.0, 130: 70.0}.get(step, 2.0 if step > 10 else 60.0)}, {},
        ["in 3 steps", "step 90 with 90"],
    ),
    "skipped": ({"skipped_steps": lambda step: float(step > 50) * 3}, {}, ["3 of 200"]),
    "hardly changed": (
        {
            "loss": lambda step: 0.5 - 1e-6 * step,
            "rewards_margin": lambda step: 0.001,
            "val_rewards_margin": lambda step: 0.002,
            "rewards_chosen_mean": lambda step: 0.001,
            "rewards_rejected_mean": lambda step: 0.0,
        },
        {"model__optim__lr": 1e-7},
        ["200 steps", "0.002", "5e-07"],
    ),
    "fall together": (
        {"val_rewards_chosen_mean": lambda step: -step / 100, "val_rewards_rejected_mean": lambda step: -step / 90},
        {},
        ["step 200", f"{MINUS}2", f"{MINUS}2.22", "model.kto.sft_loss_weight"],
    ),
    "keeps falling": ({"kl_unclamped": lambda step: -step / 5}, {}, [f"{MINUS}36.1", f"{MINUS}79.7"]),
    "probably destroyed": (
        {name: lambda step: -80.0 - 20 * step for name in LOGPS}, {"model__optim__lr": 1.0},
        ["steps 0 and 200", f"from {MINUS}80 to {MINUS}4080", "model.optim.lr=7e-06 instead of 1"],
    ),
    "batch is small": (
        {"kl_unclamped": lambda step: 1.0 + noise(8.0)(step)}, {}, ["16 examples", "model.global_batch_size=128"]
    ),
    "overfits": (
        {"val_loss": lambda step: 0.5 - step / 1000 if step <= 100 else 0.4 + (step - 100) / 500},
        {},
        ["step 100", "0.4", "0.6", "nemo-kto export RUN OUT --best"],
    ),
    "validation loss has risen since step 0": (
        {"val_loss": lambda step: 0.4 + step / 500}, {}, ["step 0", "0.4", "0.8", "early_stopping"]
    ),
    "desirable examples dominate": (
        {}, {"data": data_of(desirable=190, weights=(1.0, 0.5))}, ["190", "10", "0.5", "38", "model.kto.auto_balance=true"]
    ),
    "validation has too few rows": (
        {"val_rows": lambda step: 19.0}, {}, ["19 rows", "20", "model.data.splits_string", '"80,20"']
    ),
    "All training examples are undesirable": ({}, {"data": data_of(desirable=0)}, ["200 undesirable", "less likely"]),
    "truncated": ({}, {"data": data_of(cut=30)}, ["30 answers", "200", "64", "model.data.seq_length"]),
}  # fmt: skip


def test_a_problem_gets_its_advice_and_no_other(tmp_path: Path) -> None:
    fired = set()
    for number, (title, (metrics, options, figures)) in enumerate(CASES.items()):
        run = read_run(write_run(tmp_path / str(number), changed(healthy(), **metrics), **options))
        (advice,) = advice_for(run)
        assert title in advice.title
        text = f"{advice.reason} {advice.remedy}"
        page, _, anchor = advice.page.partition("#")
        headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
        assert [figure for figure in figures if figure not in text] == [], text
        fired |= {rule for rule in RULES if rule(run) is not None}
    short: dict[str, Any] = {"data": data_of(desirable=40, rows=80), "run": {"state": "finished", "total_steps": 5}}
    (advice,) = advice_for(run := read_run(write_run(tmp_path / "short", healthy(5), **short)))
    assert (advice.title, "5 steps of 16 examples, from 80 rows," in advice.reason) == ("The run is too short", True)
    fired |= {rule for rule in RULES if rule(run) is not None}
    assert fired == set(RULES), "every rule has a case"


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [(1280, "model.global_batch_size=128;"), (1279, "model.global_batch_size=64;"), (319, "319 rows leave too few steps")],
)
def test_a_larger_batch_leaves_ten_steps_in_an_epoch(rows: int, remedy: str, tmp_path: Path) -> None:
    lines = changed(healthy(), kl_unclamped=lambda step: 1.0 + noise(8.0)(step))
    (text,) = advice_of(tmp_path, lines, data=data_of(desirable=rows // 2, rows=rows)).values()
    assert remedy in text


def steady(**values: float) -> dict[str, Callable[[int], float]]:
    """Metrics that change linearly from 0 to these values at step 200."""
    return {name: lambda step, end=end: end * step / 200 for name, end in values.items()}  # type: ignore[misc]


LOW = steady(rewards_chosen_mean=-2.0, rewards_rejected_mean=-2.5)
LOW |= steady(val_rewards_chosen_mean=-2.0, val_rewards_rejected_mean=-2.5)
WORSE: dict[str, Any] = {"val_loss": lambda step: 0.5 - step / 1000 if step <= 100 else 0.4 + (step - 100) / 500}
STILL = {"loss": lambda step: 0.5, **steady(rewards_margin=0.0, val_rewards_margin=0.0)}
STILL |= steady(rewards_chosen_mean=0.0, rewards_rejected_mean=0.0)
NOISY = {"kl_unclamped": lambda step: 1.0 + noise(8.0)(step)}
RISES = {"loss": lambda step: 0.5 + step / 400}
BROKEN = {name: lambda step: -80.0 - 20 * step for name in LOGPS}
BATCH = "model__global_batch_size"
# What is changed in a healthy run -> title of each advice, in this order: one for each cause.
RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "kl clamped at 0 for long": ({"kl_unclamped": lambda step: -3.0 - step / 200}, {}, []),
    "kl far below 0, and no longer falling": ({"kl_unclamped": lambda step: -40.0}, {}, []),
    "kl below 0 with noise": ({"kl_unclamped": lambda step: -2.0 + noise(1.0)(step)}, {}, []),
    "rewards of both classes rise": (steady(rewards_chosen_mean=2.0, rewards_rejected_mean=1.0), {}, []),
    "undesirable answers alone become improbable": ({LOGPS[1]: BROKEN[LOGPS[1]], LOGPS[3]: BROKEN[LOGPS[3]]}, {}, []),
    "loss noisier than its rise": ({"loss": lambda step: 0.53 + noise(0.4)(step)}, {}, []),
    "rewards move, the margin does not": ({**STILL, **steady(rewards_chosen_mean=1.0, rewards_rejected_mean=1.0)}, {}, []),
    "nothing moves": (STILL, {}, ["hardly changed"]),
    "rewards fall, no margin": ({**STILL, **LOW}, {}, ["fall together"]),
    "rewards and kl fall": ({**LOW, **steady(kl_unclamped=-60.0)}, {}, ["fall together"]),
    "loss rises, rewards and kl fall": ({**LOW, **RISES, **steady(kl_unclamped=-60.0)}, {}, ["learning rate"]),
    "loss rises, validation loss too": ({**RISES, **WORSE}, {}, ["learning rate"]),
    "loss rises, kl noisy": ({**RISES, **NOISY}, {}, ["learning rate"]),
    "destroyed": ({**LOW, **RISES, **WORSE, **BROKEN, **NOISY}, {}, ["destroyed"]),
    "destroyed, and truncated": (BROKEN, {"data": data_of(cut=30)}, ["destroyed", "truncated"]),
    "overfits on 19 rows": ({**WORSE, "val_rows": lambda step: 19.0}, {}, ["too few rows"]),
    "overfits on 20 rows": ({**WORSE, "val_rows": lambda step: 20.0}, {}, ["overfits"]),
    "skipped steps": ({"skipped_steps": lambda step: 1.0}, {}, ["skipped"]),
    "skipped steps of a destroyed model": ({**BROKEN, "skipped_steps": lambda step: 1.0}, {}, ["destroyed", "skipped"]),
    "batch of 2": (NOISY, {BATCH: 2}, ["batch is small"]),
    "batch of 128": (NOISY, {BATCH: 128}, ["batch is small"]),
    "balanced by weights": ({}, {"data": data_of(desirable=40, weights=(4.0, 1.0))}, []),
    "one class": ({}, {"data": data_of(desirable=200)}, ["All training examples are desirable"]),
}  # fmt: skip
_SHORT: dict[str, Any] = {"data": data_of(desirable=40, rows=80), "run": {"state": "finished", "total_steps": 5}}
SHORT: dict[int, str] = {4: "max_epochs), or more rows.", 16: "max_epochs), or more rows.", 32: "of at least 16."}


@pytest.mark.parametrize("name", RECORDS)
def test_a_cause_is_reported_once(name: str, tmp_path: Path) -> None:
    metrics, options, titles = RECORDS[name]
    found = advice_for(read_run(write_run(tmp_path / "run", changed(healthy(), **metrics), **options)))
    assert [(title, advice.title) for title, advice in zip(titles, found, strict=True) if title not in advice.title] == []


@pytest.mark.parametrize("size", SHORT)
def test_no_batch_below_the_documented_sizes_is_advised(size: int, tmp_path: Path) -> None:
    """A batch of 16 to 128 examples is what docs/guides/settings.md advises."""
    (text,) = advice_of(tmp_path, healthy(5), **_SHORT, **{BATCH: size}).values()
    assert text.endswith(SHORT[size])
    larger = {2: "model.global_batch_size=128;", 128: "apo_zero_unpaired): the batch is large."}
    for batch, remedy in larger.items():
        (text,) = advice_of(tmp_path / str(batch), changed(healthy(), **NOISY), **{BATCH: batch}).values()
        assert remedy in text


@pytest.mark.parametrize(("lines", "options", "remedy"), [
    (BROKEN, {"model__optim__lr": 1.0}, "7e-06 instead of 1"),
    (BROKEN, {"model__optim__lr": 1.0, "model__peft__peft_scheme": "lora"}, "7e-05 instead of 1"),
    (BROKEN, {"model__optim__lr": 8e-4}, "0.00016 instead of 0.0008"),
    (STILL, {"model__optim__lr": 1e-12}, "3e-07 instead of 1e-12"),
    (STILL, {"model__optim__lr": 1e-7}, "5e-07 instead of 1e-07"),
])  # fmt: skip
def test_no_unusual_learning_rate_is_advised(
    lines: dict[str, Any], options: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    (text,) = advice_of(tmp_path, changed(healthy(), **lines), **options).values()
    assert f"model.optim.lr={remedy}" in text


def test_one_bad_validation_is_no_overfitting(tmp_path: Path) -> None:
    lines = changed(healthy(), val_loss=lambda step: 0.6 if step == 200 else 0.5 - step / 2000)
    assert advice_of(tmp_path, lines) == {}
