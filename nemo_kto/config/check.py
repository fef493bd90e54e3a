"""The check of a whole configuration, the same for training, its ranks and the commands that take a run's overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from nemo_kto.algorithms.recipes.recipe import Recipe
from nemo_kto.artifacts import hub
from nemo_kto.config import compose
from nemo_kto.config.mistakes import does_not_compose, find_mistakes
from nemo_kto.config.resolved import MODEL_KEYS, ResolvedRun, value_of, with_value
from nemo_kto.config.saved_config import redacted, saved_value
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
    leads: bool = True  # this process decides for its machine which revision of a hub model is the newest
    weights: bool = True  # the weights of hub models are needed

    def resolve(self, overrides: Sequence[str], config: DictConfig | None = None) -> ResolvedRun:
        """Return the run of a command line, whose ``config`` may be composed already; raise InvalidConfig for any error."""
        try:
            config = compose.load(overrides, source=self.source) if config is None else config
            cfg, errors = compose.to_config(config, recipe=self.recipe)
        except compose.WRONG as error:
            cfg, errors = None, [does_not_compose(error)]
        if cfg is not None:
            run, errors = self._check(cfg)
            if not errors:
                return run
        raise InvalidConfig(title=self.title, errors=self.errors(overrides) or errors)

    def errors(self, overrides: Sequence[str]) -> list[ConfigError]:
        """Find all errors in a command line; in a sweep, those of all jobs."""
        return find_mistakes(overrides, source=self.source, recipe=self.recipe, rules=self.rule_errors, sweep=self.sweep)

    def rule_errors(self, cfg: RunConfig) -> list[ConfigError]:
        return self._check(cfg)[1]

    def _check(self, cfg: RunConfig) -> tuple[ResolvedRun, list[ConfigError]]:
        """Download the hub models of a configuration and apply the rules to it.

        In the result, each hub model has the revision of which the run folder has a record, or the newest.
        """
        failed: dict[str, ConfigError] = {}
        for key in MODEL_KEYS:
            if not hub.is_hub_name(name := str(value_of(cfg, key))):
                continue
            earlier = saved_value(cfg, key) if cfg.exp_manager.resume_if_exists else None
            try:
                cfg = with_value(cfg, key, hub.pin(name, earlier=earlier, leads=self.leads, weights=self.weights))
            except UserError as error:
                failed[key] = ConfigError(key, str(error), about_files=True)
        run = ResolvedRun.of(cfg, gpus=self.gpus)
        others = [error for error in self.rules(run) if error.key not in failed and not failed.keys() & set(error.reads)]
        return run, [*failed.values(), *others]
