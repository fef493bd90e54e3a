"""All errors of a command line at once, each with its key, the value and the remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig

from nemo_kto.algorithms.recipes import Recipe
from nemo_kto.config import migration
from nemo_kto.config.compose import FREE_FORM, WRONG, Source, known_keys, load, our_source, reason, recipe_of, to_config
from nemo_kto.config.schema import RunConfig, config_type
from nemo_kto.errors import ConfigError, UserError, either
from nemo_kto.utils.fields import names

Rules = Callable[[RunConfig], Sequence[ConfigError]]  # constraints that concern several keys, files or the machine


def does_not_compose(error: BaseException) -> ConfigError:
    """Return the error for a command line that Hydra rejects for a reason that is not found in a single override."""
    return ConfigError("The command line", f"does not compose: {reason(error)}")


def find_mistakes(
    overrides: Sequence[str], *, source: Source, recipe: Recipe, rules: Rules, sweep: bool = False
) -> list[ConfigError]:
    """Find all errors in a command line; in a sweep, those of all its jobs."""
    file = f"{source.config_name}.yaml"
    try:
        basis = load(source=source)
        found = recipe_of(basis)
    except (UserError, *WRONG) as error:
        return [ConfigError(file, f"does not compose: {reason(error)}")]
    if found is not recipe:
        text = f"must be a configuration for {recipe.name}, got one for {found.name}; run `nemo-kto {found.name}`"
        return [ConfigError(file, text)]
    ours = our_source(recipe)
    fallback = basis if source == ours else load(source=ours)
    known = [*names(config_type(recipe)), *known_keys(basis, sections=True)]
    command = _CommandLine(source.adopted, recipe, known, sweep)
    errors: list[ConfigError] = []
    good: list[list[str]] = []
    for text in overrides:
        values = command.read(text)
        if isinstance(values, ConfigError):
            errors.append(values)
        else:
            good.append(values)
    for job in itertools.product(*good):
        faults: dict[str, ConfigError] = {}
        try:
            try:
                config = load(job, source=source)
            except WRONG:
                faults = {text: fault for text in job if (fault := command.fault(text))}
                config = load([text for text in job if text not in faults], source=source)
            errors += [*faults.values(), *judge(config, recipe=recipe, rules=rules, fallback=fallback)]
        except WRONG as error:
            errors += faults.values() or [ConfigError("The overrides", f"cannot be combined: {reason(error)}")]
    keys = [text.lstrip("+~-").split("=")[0] for text in overrides]
    lines = {} if source.own_file is None else dict(_key_lines(yaml.compose(source.own_file.read_bytes()), ""))
    places = {key: f"({source.own_file}:{line}) " for key, line in lines.items() if key not in keys}
    errors = [error._replace(text=places.get(error.key, "") + error.text) for error in errors]
    return sorted(dict.fromkeys(errors), key=lambda error: keys.index(error.key) if error.key in keys else len(keys))


def judge(config: DictConfig, *, recipe: Recipe, rules: Rules, fallback: DictConfig) -> list[ConfigError]:
    """Return all errors in a composed configuration; before the rules are checked, ``fallback`` replaces invalid values."""
    cfg, errors = to_config(config, recipe=recipe, fallback=fallback)
    wrong = {error.key for error in errors}
    further = [] if cfg is None else rules(cfg)
    return [*errors, *(error for error in further if wrong.isdisjoint({error.key, *error.reads}))]


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield dotted name and line number, counted from 1, of all keys of a YAML file."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from _key_lines(value, f"{prefix}{name.value}.")


class _CommandLine(NamedTuple):
    """Finds the errors in single overrides; ``known`` lists our keys and sections."""

    source: Source
    recipe: Recipe
    known: Sequence[str]
    sweep: bool

    def read(self, text: str) -> ConfigError | list[str]:
        """Parse an override; return it, or all overrides of a sweep, or the error in its form or key."""
        name = text.split("=")[0]
        if not name.strip("+~ "):
            return ConfigError("An override", f"must be written KEY=VALUE, got {text!r}; give the key")
        if name.startswith("--"):  # as on the command lines of other trainers
            key = name.removeprefix("--")
            if key in self.known:
                return ConfigError(key, f"must be written KEY=VALUE, without hyphens before it, got {text}")
            return migration.unknown_key(key, text, self.known, self.recipe)
        try:
            override = OverridesParser.create().parse_overrides([text])[0]
        except OverrideParseException:
            if "=" not in text:
                return ConfigError(name, f"must be written KEY=VALUE, got {text}")
            return ConfigError(name, f"has a value that cannot be read, got {text}; put it in quotes: '{name}=\"...\"'")
        key = override.key_or_group
        if not (key in self.known or self._is_allowed(key, is_added=override.is_add())):
            return migration.unknown_key(key, text, self.known, self.recipe)
        if override.is_delete():
            return ConfigError(key, f"cannot be deleted, got {text}; set it to another value")
        if not override.is_sweep_override():
            return [text]
        if not self.sweep:
            remedy = "write [a,b] for a list, or add --multirun for a sweep"
            return ConfigError(key, f"must have one value, got {text}; {remedy}")
        values = [f"{name}={value}" for value in override.sweep_string_iterator()]
        if key == "model.data.splits_string" and len(values) > 1:  # the jobs would have different data
            given = text.partition("=")[2]
            text = f"must have one value in a sweep, got the {len(values)} of {given}, whose quotes the shell has removed"
            return ConfigError(key, f"{text}; write '{name}=\"{given}\"'")
        return values

    def _is_allowed(self, key: str, *, is_added: bool) -> bool:
        if key.startswith(("hydra.", "hydra/", *(f"{name}." for name in FREE_FORM))):
            return True
        if is_added and key.rpartition(".")[0] == f"model.{self.recipe.name}":  # may be an option of a user-defined loss
            return True
        return migration.aligner_key(key) is not None or bool(self.source.choices(key))

    def fault(self, text: str) -> ConfigError | None:
        """Return the error if Hydra cannot apply an override."""
        key, _, value = text.lstrip("+").partition("=")
        try:
            self.source.compose([text])
        except MissingConfigException:
            return ConfigError(key, f"must be one of {', '.join(self.source.choices(key))}, got {value}")
        except WRONG as error:
            if (field := names(config_type(self.recipe)).get(key)) is not None and field.section is not None:
                return ConfigError(key, f"must be {either(field.alternatives)}, got '{value}'")
            return ConfigError(key, f"cannot be set, got {text}: {reason(error)}")
        return None
