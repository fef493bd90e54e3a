"""The check of a command line: all its errors at once, each with its key, the value and the remedy.

Training, its ranks and the commands that take a run's overrides are checked in the same way.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig

from nemo_kto.algorithms.recipes.recipe import Recipe
from nemo_kto.config import compose, migration
from nemo_kto.config.compose import WRONG
from nemo_kto.config.resolved import MODEL_KEYS, ResolvedRun, value_of, with_value
from nemo_kto.config.saved_config import saved_value, settings_of_user
from nemo_kto.config.schema import LAYOUT, RunConfig, config_type
from nemo_kto.errors import ConfigError, UserError, either
from nemo_kto.model_files import hub
from nemo_kto.utils.fields import echo, names

POSITIONS = {"MODEL": "pretrained_checkpoint.restore_from_path", "DATA": "model.data.data_prefix"}
# Short words for keys of the command line; {name}: the algorithm.
SHORT = {
    "lr": "model.optim.lr",
    "beta": "model.{name}.ref_policy_kl_penalty",
    "epochs": "trainer.{name}.max_epochs",
    "steps": "trainer.{name}.max_steps",
    "batch": "model.global_batch_size",
    "template": "model.data.apply_chat_template",
    "fields": "model.data.fields",
    "quantize": "model.quantize",
}
Rules = Callable[[RunConfig], Sequence[ConfigError]]  # constraints that concern several keys, files or the machine
_OVERRIDE = re.compile(r"[+~]\w|[^=]*=")  # +KEY, ~KEY or KEY=VALUE


class InvalidConfig(UserError):
    """A configuration with errors, which ``errors`` contains."""

    def __init__(self, *, title: str, errors: Sequence[ConfigError]) -> None:
        super().__init__("\n  ".join([f"{title}:", *dict.fromkeys(map(str, errors))]))
        self.errors = errors


def read_positions(words: Sequence[str], recipe: Recipe) -> tuple[list[str], list[ConfigError]]:
    """Return the overrides of a command line ``[MODEL [DATA]] [KEY=VALUE ...]``, and the errors in its positions.

    DATA may name several files, separated by commas, or be written as a value of model.data.data_prefix: [...] or {...}.
    The overrides have the keys that :data:`SHORT` abbreviates.
    """
    keys = names(config_type(recipe))
    words, errors = _expand_short(words, recipe)
    placed = [word for word in words if word.strip() and _is_placed(word, keys)]
    overrides = [word for word in words if word not in placed]
    for (name, key), word in zip(POSITIONS.items(), placed, strict=False):
        given = [text for text in overrides if text.lstrip("+").startswith((f"{key}=", f"{key}."))]
        if given:
            text = f"must be given once, as {name} or as KEY=VALUE, got {word} and {' '.join(given)}; leave one out"
            errors.append(ConfigError(key, text))
        else:
            overrides.append(f"{key}={_data_value(word) if name == 'DATA' else quoted(word)}")
    for group in compose.GROUPS:
        files = dict.fromkeys(text for text in overrides if text.startswith(f"{group}="))
        if len(files) > 1:
            errors.append(ConfigError(group, f"must be given once, got {' and '.join(files)}; leave one out"))
    if further := placed[len(POSITIONS) :]:
        text = f"must have two words without =, MODEL and DATA, got {', '.join(further)} after them"
        remedy = "write settings as KEY=VALUE, and several data files as FILE,FILE"
        errors.append(ConfigError("The command line", f"{text}; {remedy}"))
    return overrides, errors


def _expand_short(words: Sequence[str], recipe: Recipe) -> tuple[list[str], list[ConfigError]]:
    """Return the words with whole keys in the place of short ones, and an error for each key that is given in both forms."""
    expanded, errors = list[str](), list[ConfigError]()
    for word in words:
        short, equals, value = word.partition("=")
        if not equals or short not in SHORT:
            expanded.append(word)
            continue
        key = SHORT[short].format(name=recipe.name)
        value = _mapping(value) if short == "fields" else value
        expanded.append(f"{key}={value}")
        if given := [other for other in words if other.startswith(f"{key}=")]:
            text = f"must be given once, as {short} or as {key}, got {word} and {' '.join(given)}; leave one out"
            errors.append(ConfigError(key, text))
    return expanded, errors


def _mapping(text: str) -> str:
    """Return OURS:COLUMN,... as a value of Hydra; other texts, such as one in braces, are left as they are."""
    if text.startswith("{") or not re.fullmatch(r"[^:,]+:[^,]+(,[^:,]+:[^,]+)*", text):
        return text
    pairs = (part.partition(":") for part in text.split(","))
    return f"{{{','.join(f'{ours}{colon}{override_value(column)}' for ours, colon, column in pairs)}}}"


def _is_placed(word: str, keys: Mapping[str, object]) -> bool:
    """Return whether a word is a MODEL or DATA, which may be an existing path that contains =, and no override."""
    if _OVERRIDE.match(word):
        return word.partition("=")[0] not in keys and os.path.exists(word)
    return not ("." in word and word in keys)


def _data_value(word: str) -> str:
    if word.startswith(("[", "{")):
        return word
    if "," not in word or os.path.exists(word):
        return quoted(word)
    return f"[{','.join(map(quoted, word.split(',')))}]"


def quoted(text: str) -> str:
    """Quote a string for Hydra, where a backslash is only special before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def override_value(value: object) -> str:
    """Write a value as an override has it, in Hydra's grammar."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{override_value(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_value, value))}]"
    text = echo(value)
    is_plain = not isinstance(value, str) or re.fullmatch(r"[\w./:@+-]+", text) is not None
    return text if is_plain else quoted(text)


def given_keys(cfg: RunConfig, overrides: Sequence[str]) -> set[str]:
    """Return the keys on a command line, and those with other values than our defaults."""
    return {*settings_of_user(cfg), *(text.lstrip("+").partition("=")[0] for text in overrides)}


def _open_keys(cfg: RunConfig, overrides: Sequence[str]) -> set[str]:
    """Return the keys of the layout that recipe=auto will set; none without it."""
    if not any(map(compose.is_auto, overrides)):
        return set()
    layout = {key for key, field in names(type(cfg)).items() if field.resume is LAYOUT and key.startswith("model.")}
    return layout - given_keys(cfg, overrides)


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

    def resolve(self, words: Sequence[str], config: DictConfig | None = None) -> ResolvedRun:
        """Return the run of a command line, whose ``config`` may be composed already; raise InvalidConfig for any error."""
        overrides, misplaced = read_positions(words, self.recipe)
        if misplaced:
            raise InvalidConfig(title=self.title, errors=self.errors(words))
        try:
            config = compose.load(overrides, source=self.source) if config is None else config
            cfg, errors = compose.to_config(config, recipe=self.recipe)
        except WRONG as error:
            cfg, errors = None, [does_not_compose(error)]
        if cfg is not None:
            run, errors = self._check(cfg, overrides)
            if not errors:
                return run
        raise InvalidConfig(title=self.title, errors=self.errors(words) or errors)

    def errors(self, words: Sequence[str]) -> list[ConfigError]:
        """Find all errors in a command line; in a sweep, those of all jobs."""
        overrides, misplaced = read_positions(words, self.recipe)
        source, recipe, rules = self.source, self.recipe, partial(self.rule_errors, overrides=overrides)
        return [*misplaced, *find_mistakes(overrides, source=source, recipe=recipe, rules=rules, sweep=self.sweep)]

    def rule_errors(self, cfg: RunConfig, overrides: Sequence[str] = ()) -> list[ConfigError]:
        return self._check(cfg, overrides)[1]

    def _check(self, cfg: RunConfig, overrides: Sequence[str]) -> tuple[ResolvedRun, list[ConfigError]]:
        """Download the hub models of a configuration and apply the rules to it.

        In the result, each hub model has the revision of which the run folder has a record, or the newest. Errors that
        depend on what recipe=auto will set are left out.
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
        run = ResolvedRun.of(cfg, gpus=self.gpus, weights=self.weights)
        unknown = failed.keys() | _open_keys(cfg, overrides)
        others = [error for error in self.rules(run) if unknown.isdisjoint({error.key, *error.reads})]
        return run, [*failed.values(), *others]


# ---- all errors ----


def does_not_compose(error: BaseException) -> ConfigError:
    """Return the error for a command line that Hydra rejects for a reason that is not found in a single override."""
    return ConfigError("The command line", f"does not compose: {compose.reason(error)}")


def find_mistakes(
    overrides: Sequence[str], *, source: compose.Source, recipe: Recipe, rules: Rules, sweep: bool = False
) -> list[ConfigError]:
    """Find all errors in a command line; in a sweep, those of all its jobs."""
    file = f"{source.config_name}.yaml"
    try:
        basis = compose.load(source=source)
        found = compose.recipe_of(basis)
    except (UserError, *WRONG) as error:
        return [ConfigError(file, f"does not compose: {compose.reason(error)}")]
    if found is not recipe:
        text = f"must be a configuration for {recipe.name}, got one for {found.name}; run `nemo-kto {found.name}`"
        return [ConfigError(file, text)]
    ours = compose.our_source(recipe)
    fallback = basis if source == ours else compose.load(source=ours)
    known = [*names(config_type(recipe)), *compose.known_keys(basis, sections=True)]
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
                config = compose.load(job, source=source)
            except WRONG:
                faults = {text: fault for text in job if (fault := command.fault(text))}
                config = compose.load([text for text in job if text not in faults], source=source)
            errors += [*faults.values(), *judge(config, recipe=recipe, rules=rules, fallback=fallback)]
        except WRONG as error:
            errors += faults.values() or [ConfigError("The overrides", f"cannot be combined: {compose.reason(error)}")]
    keys = [text.lstrip("+~-").split("=")[0] for text in overrides]
    lines = {} if source.own_file is None else dict(_key_lines(yaml.compose(source.own_file.read_bytes()), ""))
    places = {key: f"({source.own_file}:{line}) " for key, line in lines.items() if key not in keys}
    errors = [error._replace(text=places.get(error.key, "") + error.text) for error in errors]
    return sorted(dict.fromkeys(errors), key=lambda error: keys.index(error.key) if error.key in keys else len(keys))


def judge(config: DictConfig, *, recipe: Recipe, rules: Rules, fallback: DictConfig) -> list[ConfigError]:
    """Return all errors in a composed configuration; before the rules are checked, ``fallback`` replaces invalid values."""
    cfg, errors = compose.to_config(config, recipe=recipe, fallback=fallback)
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

    source: compose.Source
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
        if key.startswith(("hydra.", "hydra/", *(f"{name}." for name in compose.FREE_FORM))):
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
            return ConfigError(key, f"cannot be set, got {text}: {compose.reason(error)}")
        return None
