"""Model, data and shared runs of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_kto.distributed import state
from tests.gpu.jobs import FAMILIES, LORA, OF_FAMILY, Workplace
from tests.helpers.tiny_models import make_checkpoint, make_pairs, make_rows, write_rows

EXPECTED = {"kto": ("kto", ()), "lora": ("kto", (*LORA, "model.reference.mode=adapter")), "dpo": ("dpo", ())}
EXPECTED |= {name: ("kto", model) for name, model in OF_FAMILY.items()}


@pytest.fixture(autouse=True)
def _destroy_groups() -> Iterator[None]:
    """Destroy the process groups that a test leaves: the next one could not form its own."""
    yield
    state.destroy()


@pytest.fixture
def one_rank() -> None:
    state.init_distributed(layout=state.Layout(), seed=3)


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("gpu")
    for name, family in FAMILIES.items():
        make_checkpoint(folder / name, family)
    return Workplace(
        model=make_checkpoint(folder / "model", "llama"),
        rows=write_rows(folder / "kto.jsonl", make_rows(48)),
        pairs=write_rows(folder / "dpo.jsonl", make_pairs(48)),
        folder=folder,
    )


@pytest.fixture(scope="package")
def expected(place: Workplace) -> Callable[[str], Path]:
    """``expected(name)``: the folder of the fp32 run on the CPU that others are compared with, by its name in EXPECTED.

    It computes the prompt of each answer separately.
    """
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            algorithm, overrides = EXPECTED[name]
            always = "trainer.accelerator=cpu", "model.data.share_prompts=false"
            made[name] = place.run(f"expected-{name}", *always, *overrides, algorithm=algorithm)
        return made[name]

    return get
