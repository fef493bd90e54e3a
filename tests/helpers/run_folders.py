"""Run folders as a run leaves them, with made-up metrics, settings, data, rewards, samples, comparisons and warnings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config import compose

# Metrics of two runs of SmolLM2-135M: good.jsonl, bad.jsonl.
RECORDED = Path(__file__).resolve().parents[1] / "data" / "metrics"
_BATCH = 16


@cache
def _defaults(algorithm: str) -> DictConfig:
    return compose.load(source=compose.our_source(RECIPES[algorithm]))


def write_run(
    folder: Path,
    metrics: Sequence[Mapping[str, Any]] | Path,
    *,
    algorithm: str = "kto",
    run: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    **settings: object,
) -> Path:
    """Write the folder of a run with these metrics, lines or a file of them; ``settings`` by key, with __ for its dots."""
    folder.mkdir(parents=True, exist_ok=True)
    text = metrics.read_text() if isinstance(metrics, Path) else "".join(json.dumps(line) + "\n" for line in metrics)
    (folder / "metrics.jsonl").write_text(text)
    given = {key.replace("__", "."): value for key, value in settings.items()}
    given = {"model.global_batch_size": _BATCH, "pretrained_checkpoint.restore_from_path": "models/tiny", **given}
    config = _defaults(algorithm).copy()
    for key, value in {"model.data.data_prefix": "rows.jsonl", **given}.items():
        OmegaConf.update(config, key, value)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    content = {"state": "finished", "algorithm": algorithm, "settings": given, "total_steps": 100, **(run or {})}
    (folder / "run.json").write_text(json.dumps(content))
    if data is not None:
        (folder / "data.json").write_text(json.dumps(data))
    return folder


def healthy(steps: int = 200, *, every: int = 20, seed: int = 0, batch: int = 64) -> list[dict[str, Any]]:
    """Lines of the log of a run that learns: the margin grows, the loss falls, the KL estimate grows slowly."""
    draw = np.random.default_rng(seed)
    lines = []
    for step in range(steps + 1):
        done = 1 - np.exp(-3 * step / steps)
        values = {
            "loss": 0.5 - 0.12 * done,
            "kl_unclamped": 4.0 * done,
            "kl": 4.0 * done,
            "rewards_chosen_mean": 0.6 * done,
            "rewards_rejected_mean": -0.7 * done,
            "rewards_margin": 1.3 * done,
            "logps_chosen_mean": -80.0 + 6 * done,
            "logps_rejected_mean": -80.0 - 7 * done,
        }
        if step % every == 0:
            auc = {"auc": 0.5 + 0.4 * done, "rows": 200.0}
            lines.append(
                {"step": step, "time": 1e9 + step, **{f"val/{name}": value for name, value in {**values, **auc}.items()}}
            )
        if step:
            noisy = {name: value + draw.normal() * 0.3 * abs(value) / np.sqrt(batch) for name, value in values.items()}
            train = {f"train/{name}": float(value) for name, value in noisy.items()}
            lines.append(
                {
                    "step": step,
                    "time": 1e9 + step,
                    **train,
                    "train/grad_norm": float(2 + 0.3 * draw.normal()),
                    "train/lr": 1e-6 * (1 - step / steps),
                    "train/skipped_steps": 0.0,
                    "timing/step_time": 1.0,
                    "perf/tokens_per_sec": 1000.0,
                    "perf/peak_memory_gb": 3.0,
                }
            )
    return lines


def changed(lines: Sequence[Mapping[str, Any]], **metrics: Any) -> list[dict[str, Any]]:
    """The lines with other values of some train metrics (or, named val_NAME, validation metrics): functions of the step."""
    names = {f"val/{name[4:]}" if name.startswith("val_") else f"train/{name}": make for name, make in metrics.items()}
    return [{key: names[key](line["step"]) if key in names else value for key, value in line.items()} for line in lines]


def data_of(
    *, desirable: int = 100, rows: int = 200, cut: int = 0, weights: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Any]:
    """Statistics of data, as data.json has them."""
    counts = {
        "rows": rows,
        "desirable": desirable,
        "tokens": 40 * rows,
        "longest": 90,
        "cut_prompts": 0,
        "cut_responses": cut,
    }
    lengths = {
        name: {"width": 4, "counts": [3, 9, 5, 1], "last_is_open": False} for name in ("prompt", "desirable", "undesirable")
    }
    return {
        "unit": "rows",
        "seq_length": 64,
        "balance": {"examples": [desirable, rows - desirable], "weights": list(weights)},
        "sets": {"train": {**counts, "lengths": lengths}},
    }


def write_extras(folder: Path) -> Path:
    """Add rewards, samples, comparisons and warnings to a run folder."""
    rewards = [
        {"step": 0, "set": "", "width": 0.125, "first": -1, "desirable": [40, 60], "undesirable": [50, 50]},
        {
            "step": 200,
            "set": "",
            "width": 0.25,
            "first": -8,
            "desirable": [*[0] * 8, 30, 60, 10],
            "undesirable": [9, 90, 1, *[0] * 8],
        },
    ]
    samples = [
        {
            "step": step,
            "model": model,
            "index": index,
            "prompt": f"Prompt {index}?",
            "messages": None,
            "answer": f"<b>answer</b> {index} of {model} & step {step}",
            "tokens": 4,
            "ended": index < 1,
        }
        for index in range(2)
        for step, model in ((0, "reference"), (20, "policy"), (100, "policy"), (200, "policy"))
    ]
    extremes: list[dict[str, object]] = [
        {
            "step": step,
            "set": "",
            "best": best,
            "row": f"rows.jsonl:{step + best}",
            "reward": reward,
            "prompt": "<|im_start|>user\nWhy <i>?<|im_end|>\n<|im_start|>assistant\n",
            "answers": {"undesirable": f"<u>answer</u> of step {step}"},
        }
        for step in (0, 200)
        for best, reward in ((False, 1.234), (True, -2.0))
    ]
    warnings = [{"step": 0, "time": 1e9, "level": "warning", "text": "<script>alert(1)</script> in the rows"}]
    comparisons: list[dict[str, object]] = [
        {
            "base": f"models/{base}",
            "by": "judge <b>large</b>",
            "wins": 120,
            "ties": 10,
            "losses": 70,
            "rate": rate,
            "interval": [rate - 0.07, rate + 0.065],
            "length_controlled": 0.58,
            "mean_lengths": [310.5, 280.0],
        }
        for base, rate in (("start", 0.625), ("last", 0.51))
    ]
    files: dict[str, list[dict[str, Any]]] = {
        "comparisons": comparisons,
        "rewards": rewards,
        "extremes": extremes,
        "samples": samples,
        "warnings": warnings,
    }
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
