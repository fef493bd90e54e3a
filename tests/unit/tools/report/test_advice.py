"""Advice: each rule on curves that it is about, and silence about a run that is well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
        },
        {"model__optim__lr": 1e-7},
        ["200 steps", "0.002", "5e-07"],
    ),
    "fall together": (
        {"val_rewards_chosen_mean": lambda step: -step / 100, "val_rewards_rejected_mean": lambda step: -step / 90},
        {},
        ["step 200", f"{MINUS}2", f"{MINUS}2.22", "model.kto.sft_loss_weight"],
    ),
    "clamped": ({"kl_unclamped": lambda step: -3.0 - step / 200}, {}, ["100 %", f"{MINUS}3.75"]),
    "batch is small": (
        {"kl_unclamped": lambda step: 1.0 + noise(8.0)(step)}, {}, ["16 examples", "model.global_batch_size=256"]
    ),
    "overfits": (
        {"val_loss": lambda step: 0.5 - step / 1000 if step <= 100 else 0.4 + (step - 100) / 500},
        {},
        ["step 100", "0.4", "0.6", "export.which=best"],
    ),
    "validation loss has risen since step 0": (
        {"val_loss": lambda step: 0.4 + step / 500}, {}, ["step 0", "0.4", "0.8", "early_stopping"]
    ),
    "desirable examples dominate": (
        {}, {"data": data_of(desirable=190, weights=(1.0, 0.5))}, ["190", "10", "0.5", "38", "model.kto.auto_balance=true"]
    ),
    "truncated": ({}, {"data": data_of(cut=30)}, ["30 answers", "200", "64", "model.data.seq_length"]),
}  # fmt: skip


def test_a_problem_gets_its_advice_and_no_other(tmp_path: Path) -> None:
    fired = set()
    for number, (title, (metrics, options, figures)) in enumerate(CASES.items()):
        run = read_run(write_run(tmp_path / str(number), changed(healthy(), **metrics), **options))
        (advice,) = advice_for(run)
        assert title in advice.title
        text = f"{advice.reason} {advice.remedy}"
        assert [figure for figure in figures if figure not in text] == [], text
        fired |= {rule for rule in RULES if rule(run) is not None}
    short: dict[str, Any] = {"data": data_of(desirable=40, rows=80), "run": {"state": "finished", "total_steps": 5}}
    (advice,) = advice_for(run := read_run(write_run(tmp_path / "short", healthy(5), **short)))
    assert (advice.title, "5 steps of 16 examples, from 80 rows," in advice.reason) == ("The run is too short", True)
    fired |= {rule for rule in RULES if rule(run) is not None}
    assert fired == set(RULES), "every rule has a case"


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [(2560, "model.global_batch_size=256;"), (2559, "model.global_batch_size=128;"), (319, "319 leave too few steps")],
)
def test_a_larger_batch_leaves_ten_steps_in_an_epoch(rows: int, remedy: str, tmp_path: Path) -> None:
    lines = changed(healthy(), kl_unclamped=lambda step: 1.0 + noise(8.0)(step))
    (text,) = advice_of(tmp_path, lines, data=data_of(desirable=rows // 2, rows=rows)).values()
    assert remedy in text


def test_one_bad_validation_is_no_overfitting(tmp_path: Path) -> None:
    lines = changed(healthy(), val_loss=lambda step: 0.6 if step == 200 else 0.5 - step / 2000)
    assert advice_of(tmp_path, lines) == {}
