"""The calls from fit to the loss that docs/internals/design.md lists are those of a real step."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train

REPOSITORY = Path(__file__).resolve().parents[3]
MOST_CALLS = 4


def documented() -> list[tuple[str, str]]:
    """(function, file) of each line of the list."""
    text = (REPOSITORY / "docs/internals/design.md").read_text(encoding="utf-8")
    section = text.split("## The walk of a batch")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. \[`([\w.]+)`\]\((?:\.\./)+([\w/]+\.py)\)", section, re.MULTILINE)


def walked(model: Path, rows: Path, folder: Path) -> list[tuple[str, str]]:
    """On a rank: our functions on the stack while the loss of a training step is computed, and the loss."""
    from dataclasses import replace

    from nemo_kto.losses.kto import LOSSES

    seen: list[list[tuple[str, str]]] = []
    original = LOSSES["kto"]

    @functools.wraps(original.function)  # its parameters are those of the loss
    def loss(*values: Any, **settings: Any) -> Any:
        names = []
        for frame in inspect.stack()[1:]:
            file = Path(frame.filename)
            if file.is_relative_to(REPOSITORY / "nemo_kto"):
                owner = type(frame.frame.f_locals["self"]).__name__ + "." if "self" in frame.frame.f_locals else ""
                names.append((owner + frame.function, file.relative_to(REPOSITORY).as_posix()))
        seen.append(names)
        return original.function(*values, **settings)

    LOSSES["kto"] = replace(original, function=loss)
    evaluation = "nemo_kto.models.nlp.gpt.megatron_gpt_kto_model.without_rounding_errors"
    try:
        with mock.patch(evaluation, side_effect=AssertionError("a step needs no rewards of single examples")):
            train(model, rows, folder, 1, ["trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=0"])
    finally:
        LOSSES["kto"] = original
    source = Path(inspect.getsourcefile(original.function) or "").relative_to(REPOSITORY).as_posix()
    walk = [*reversed(seen[0]), (original.function.__name__, source)]
    first = next(index for index, (name, _) in enumerate(walk) if name.endswith(".fit"))
    return [("DPOTrainer.fit" if index == first else name, file) for index, (name, file) in enumerate(walk)][first:]


def test_the_documented_calls_are_those_of_a_step(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    (walk,) = ranks.run(1, walked, tiny_llama, kto_rows, tmp_path / "run")
    assert walk == documented()
    assert len(walk) - 1 <= MOST_CALLS
