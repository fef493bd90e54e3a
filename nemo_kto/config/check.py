"""The check of a whole configuration, the same for training, its ranks and the commands that take a run's overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from nemo_kto.algorithms.recipes.recipe import Recipe
from nemo_kto.config import compose
from nemo_kto.config.mistakes import does_not_compose, find_mistakes
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.saved_config import redacted
from nemo_kto.config.schema import RunConfig
from nemo_kto.errors import ConfigError, UserError


class InvalidConfig(UserError):
    """A configuration with errors, which ``errors`` contains; in the message, secrets are redacted."""

    def __init__(self, *, title: str, errors: Sequence[ConfigError]) -> None:
        super().__init__(redacted("\n  ".join([f"{title}:", *dict.fromkeys(map(str, errors))])))
        self.errors = errors


@dataclass(frozen=True, kw_only=True)
class Checker:
    """Checks command lines of one algorithm."""

    recipe: Recipe
    source: compose.Source
    rules: Callable[[ResolvedRun], list[ConfigError]]  # finds the errors that the types do not show
    gpus: int | None = None  # per machine; None for those of this machine
    sweep: bool = False  # a key may have several values, one for each of several jobs
    title: str = "the configuration is invalid"  # first line of the message that lists the errors

    def resolve(self, overrides: Sequence[str], config: DictConfig | None = None) -> ResolvedRun:
        """Return the run of a command line, whose ``config`` may be composed already; raise InvalidConfig for any error."""
        try:
            config = compose.load(overrides, source=self.source) if config is None else config
            cfg, errors = compose.to_config(config, recipe=self.recipe)
        except compose.WRONG as error:
            cfg, errors = None, [does_not_compose(error)]
        if cfg is not None:
            run = ResolvedRun.of(cfg, gpus=self.gpus)
            if not (errors := self.rules(run)):
                return run
        raise InvalidConfig(title=self.title, errors=self.errors(overrides) or errors)

    def errors(self, overrides: Sequence[str]) -> list[ConfigError]:
        """Find all errors in a command line; in a sweep, those of all jobs."""
        return find_mistakes(overrides, source=self.source, recipe=self.recipe, rules=self.rule_errors, sweep=self.sweep)

    def rule_errors(self, cfg: RunConfig) -> list[ConfigError]:
        return self.rules(ResolvedRun.of(cfg, gpus=self.gpus))
