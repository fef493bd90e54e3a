"""What is said of a pipeline that a model's layers do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.launch.conftest import Said

STAGES, CHUNKS = "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"
FIRST, LAST = (f"model.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
EMBEDDING, LOSS = (f"model.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
FULL = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform")]
GROUP = "model.activations_checkpoint_num_layers"


def layers(folder: Path, number: int) -> str:
    """Let the model have so many layers. Returns its folder."""
    file = folder / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": number}))
    return str(folder / "model")


@pytest.mark.parametrize(
    ("number", "overrides", "told"),
    [
        (5, [f"{STAGES}=2"], f"{STAGES} must divide the 5 layers of MODEL, got 2; use 1, or {LAST}=2"),
        (9, [f"{STAGES}=8"], f"{STAGES} must divide the 9 layers of MODEL, got 8; use 3, or {LAST}=2"),
        (3, [f"{STAGES}=4"], f"{STAGES} must divide the 3 layers of MODEL, got 4; use 3"),
        (
            6,
            [f"{STAGES}=3", f"{LOSS}=true"],
            f"{STAGES} must divide loss and the 6 layers of MODEL, got 3; use {LOSS}=false",
        ),
        (
            8,
            [f"{STAGES}=4", f"{EMBEDDING}=true", f"{LOSS}=true"],
            f"{STAGES} must divide embedding, loss and the 8 layers of MODEL, got 4; use 2",
        ),
        (
            24,
            [f"{STAGES}=4", f"{CHUNKS}=4"],
            f"{CHUNKS} must divide each stage's share (6) of the 24 layers of MODEL, got 4; use 3",
        ),
        (
            4,
            [f"{STAGES}=4", f"{CHUNKS}=2"],
            f"{CHUNKS} must divide each stage's share (1) of the 4 layers of MODEL, got 2; use null",
        ),
        (
            14,
            [f"{STAGES}=4", f"{CHUNKS}=2", f"{FIRST}=3"],
            f"{FIRST} must leave the other stages equal shares of the 14 layers of MODEL, got 3; use 2, or 8",
        ),
        (
            32,
            [f"{STAGES}=4", f"{FIRST}=7", f"{LAST}=6"],
            f"{FIRST} must leave the other stages equal shares of the 32 layers of MODEL, got 7; use 6, or 8",
        ),
        (
            32,
            [f"{STAGES}=4", f"{LAST}=30"],
            f"{LAST} must leave the other stages equal shares of the 32 layers of MODEL, got 30; use 29",
        ),
        (
            5,
            [f"{STAGES}=2", f"{FIRST}=1", f"{LAST}=3"],
            f"{FIRST} must make up, with the 3 of the last stage, the 5 layers of MODEL, got 1; use 2",
        ),
        (
            7,
            [f"{STAGES}=2", f"{CHUNKS}=3", f"{FIRST}=4"],
            f"{CHUNKS} must divide each stage's share (3 and 4) of the 7 layers of MODEL, got 3; use null",
        ),
        (4, [*FULL, f"{GROUP}=3"], f"{GROUP} must divide the layers that stages have in one piece (4), got 3; use 2"),
        (
            8,
            [f"{STAGES}=2", f"{CHUNKS}=2", *FULL, f"{GROUP}=4"],
            f"{GROUP} must divide the layers that stages have in one piece (2), got 4; use 2",
        ),
        (
            5,
            [f"{STAGES}=2", f"{LAST}=2", *FULL, f"{GROUP}=2"],
            f"{GROUP} must divide the layers that stages have in one piece (2 and 3), got 2; use 1",
        ),
    ],
)
def test_layers_that_do_not_fit(said: Said, tmp_path: Path, number: int, overrides: list[str], told: str) -> None:
    model = layers(tmp_path, number)
    assert said(*overrides, ranks=8 if f"{STAGES}=3" not in overrides else 6, torchrun=True)[-1:] == [
        told.replace("MODEL", model)
    ]


@pytest.mark.parametrize(
    ("number", "overrides"),
    [
        (5, [f"{STAGES}=2", f"{LAST}=2"]),
        (6, [f"{STAGES}=4", f"{EMBEDDING}=true", f"{LOSS}=true"]),
        (14, [f"{STAGES}=4", f"{CHUNKS}=2", f"{FIRST}=2", f"{LAST}=4"]),
        (12, [f"{STAGES}=2", f"{CHUNKS}=3", *FULL, f"{GROUP}=2"]),
    ],
)
def test_layers_that_fit(said: Said, tmp_path: Path, number: int, overrides: list[str]) -> None:
    layers(tmp_path, number)
    assert said(*overrides, ranks=4) == []


def test_what_needs_a_pipeline(said: Said) -> None:
    assert said(f"{CHUNKS}=2", f"{LAST}=3", f"{LOSS}=true") == [
        f"{CHUNKS} needs {STAGES} above 1, got 2 and 1; raise it or set {CHUNKS}=null",
        f"{LAST} needs {STAGES} above 1, got 3 and 1; raise it or set {LAST}=null",
        f"{LOSS} needs {STAGES} above 1, got true and 1; raise it or set {LOSS}=false",
    ]


def test_what_says_the_same_twice(said: Said) -> None:
    assert said(f"{STAGES}=2", f"{FIRST}=3", f"{EMBEDDING}=true", ranks=2) == [
        f"{EMBEDDING} must be false where {FIRST} say how many layers a stage has, got true; give one or the other"
    ]


def test_impossible_numbers(said: Said) -> None:
    assert said(f"{STAGES}=2", f"{CHUNKS}=1", f"{FIRST}=0", ranks=2) == [
        f"{CHUNKS} must be at least 2, got 1; null: no virtual pipeline",
        f"{FIRST} must be at least 1, got 0",
    ]
