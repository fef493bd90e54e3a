"""Valid configurations of every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from omegaconf import DictConfig

from nemo_kto.algorithms.recipes import KTO, RECIPES, Recipe
from nemo_kto.cli.job import Job
from nemo_kto.config import compose
from nemo_kto.config.checker import judge
from nemo_kto.config.schema import RunConfig
from nemo_kto.processes.ranks import World
from tests.helpers.messages import Message
from tests.helpers.tiny_models import write_stub_adapter, write_stub_model

Text = TypeVar("Text", str, Message)


class Load(Protocol):
    """``load("key=value", ...)``: the typed configuration."""

    def __call__(self, *overrides: str, recipe: Recipe = KTO) -> RunConfig: ...


class FindErrors(Protocol):
    """``find_errors("key=value", ...)``: the errors of a configuration on a number of ranks."""

    def __call__(
        self, *overrides: str, recipe: Recipe = KTO, ranks: int = 1, sweep: bool = False, torchrun: bool = False
    ) -> list[str]: ...


def composed(overrides: Sequence[str], recipe: Recipe = KTO) -> DictConfig:
    return compose.load(overrides, source=compose.our_source(recipe))


def errors_of(
    config: DictConfig, recipe: Recipe, *, ranks: int = 1, sweep: bool = False, torchrun: bool = False
) -> list[str]:
    world = None if ranks == 1 else World(rank=0, size=ranks, local_rank=0, local_size=ranks, sees_same=torchrun)
    job = Job(recipe=recipe, source=compose.our_source(recipe), world=world)
    rules = job.checker(sweep=sweep).rule_errors
    return [str(mistake) for mistake in judge(config, recipe=recipe, rules=rules, fallback=composed([], recipe))]


def mistakes(overrides: Sequence[str], recipe: Recipe = KTO, *, sweep: bool = False) -> list[str]:
    """Errors of a command line, except for missing required keys."""
    job = Job(recipe=recipe, source=compose.our_source(recipe), world=None)
    found = job.checker(sweep=sweep).errors(overrides)
    return [str(error) for error in found if not error.text.startswith("must be given, got n")]


def of(recipe: Recipe, texts: Sequence[Text]) -> list[Text]:
    """Replace ALGORITHM in texts by the name of a recipe."""
    return [text.replace("ALGORITHM", recipe.name) for text in texts]


@pytest.fixture(params=list(RECIPES.values()), ids=list(RECIPES))
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """One after the other."""
    found: Recipe = request.param
    return found


@pytest.fixture(params=[each for each in RECIPES.values() if each is not KTO], ids=lambda each: each.name)
def other(request: pytest.FixtureRequest) -> Recipe:
    """Each but KTO, for which the tables are gone through one entry after the other."""
    found: Recipe = request.param
    return found


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides that name a model folder and a data file that exist."""
    write_stub_model(tmp_path / "model")
    write_stub_adapter(tmp_path / "adapter")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "response": "r", "preference": "chosen"}\n')
    return [
        f"pretrained_checkpoint.restore_from_path={tmp_path}/model",
        f"model.data.data_prefix={tmp_path}/rows.jsonl",
        "trainer.accelerator=cpu",
    ]


@pytest.fixture
def load(good: list[str]) -> Load:
    """What makes a typed configuration of overrides that are right."""

    def get(*overrides: str, recipe: Recipe = KTO) -> RunConfig:
        cfg, mistakes = compose.to_config(composed([*good, *overrides], recipe))
        assert mistakes == []
        assert cfg is not None
        return cfg

    return get


@pytest.fixture
def find_errors(good: list[str]) -> FindErrors:
    """What judges overrides."""

    def get(*overrides: str, recipe: Recipe = KTO, ranks: int = 1, sweep: bool = False, torchrun: bool = False) -> list[str]:
        return errors_of(composed([*good, *overrides], recipe), recipe, ranks=ranks, sweep=sweep, torchrun=torchrun)

    return get
