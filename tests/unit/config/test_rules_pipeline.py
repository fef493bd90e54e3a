"""Rules of pipelines whose size does not divide the layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.messages import Message
from tests.unit.conftest import FindErrors

STAGES, CHUNKS = "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"
FIRST, LAST = (f"model.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
EMBEDDING, LOSS = (f"model.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
FULL = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform")]
GROUP = "model.activations_checkpoint_num_layers"


def layers(folder: Path, number: int) -> str:
    """Set the model's number of layers. Returns its folder."""
    file = folder / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": number}))
    return str(folder / "model")


@pytest.mark.parametrize(
    ("number", "overrides", "expected"),
    [
        (5, [f"{STAGES}=2"], Message(STAGES, "5", "MODEL", "2", "1", f"{LAST}=2")),
        (9, [f"{STAGES}=8"], Message(STAGES, "9", "MODEL", "8", "3", f"{LAST}=2")),
        (3, [f"{STAGES}=4"], Message(STAGES, "3", "MODEL", "4", "use")),
        (6, [f"{STAGES}=3", f"{LOSS}=true"], Message(STAGES, "6", "MODEL", "3", f"{LOSS}=false")),
        (8, [f"{STAGES}=4", f"{EMBEDDING}=true", f"{LOSS}=true"], Message(STAGES, "8", "MODEL", "4", "2")),
        (24, [f"{STAGES}=4", f"{CHUNKS}=4"], Message(CHUNKS, "6", "24", "MODEL", "4", "3")),
        (4, [f"{STAGES}=4", f"{CHUNKS}=2"], Message(CHUNKS, "1", "4", "MODEL", "2", "null")),
        (14, [f"{STAGES}=4", f"{CHUNKS}=2", f"{FIRST}=3"], Message(FIRST, "14", "MODEL", "3", "2", "8")),
        (32, [f"{STAGES}=4", f"{FIRST}=7", f"{LAST}=6"], Message(FIRST, "32", "MODEL", "7", "6", "8")),
        (32, [f"{STAGES}=4", f"{LAST}=30"], Message(LAST, "32", "MODEL", "30", "29")),
        (5, [f"{STAGES}=2", f"{FIRST}=1", f"{LAST}=3"], Message(FIRST, "3", "last", "5", "MODEL", "1", "2")),
        (7, [f"{STAGES}=2", f"{CHUNKS}=3", f"{FIRST}=4"], Message(CHUNKS, "3", "4", "7", "MODEL", "null")),
        (4, [*FULL, f"{GROUP}=3"], Message(GROUP, "4", "3", "2")),
        (8, [f"{STAGES}=2", f"{CHUNKS}=2", *FULL, f"{GROUP}=4"], Message(GROUP, "2", "4", "use")),
        (5, [f"{STAGES}=2", f"{LAST}=2", *FULL, f"{GROUP}=2"], Message(GROUP, "2", "3", "1")),
    ],
)
def test_uneven_layers_that_are_refused(
    find_errors: FindErrors, tmp_path: Path, number: int, overrides: list[str], expected: str
) -> None:
    model = layers(tmp_path, number)
    assert find_errors(*overrides, ranks=8 if f"{STAGES}=3" not in overrides else 6, torchrun=True)[-1:] == [
        expected.replace("MODEL", model)
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
def test_uneven_layers_that_are_accepted(find_errors: FindErrors, tmp_path: Path, number: int, overrides: list[str]) -> None:
    layers(tmp_path, number)
    assert find_errors(*overrides, ranks=4) == []


def test_impossible_pipeline_sizes(find_errors: FindErrors) -> None:
    assert find_errors(f"{STAGES}=2", f"{CHUNKS}=1", f"{FIRST}=0", ranks=2) == [
        Message(CHUNKS, "2", "1", "null"),
        Message(FIRST, "1", "0"),
    ]
