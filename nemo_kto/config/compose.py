"""Composition of the configuration with Hydra, including files of NeMo-Aligner, and detection of errors in it."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config import migration
from nemo_kto.config.schema import RunConfig, config_type
from nemo_kto.errors import ConfigError, UserError, either
from nemo_kto.losses.loss import Loss
from nemo_kto.utils.field_errors import echo, mistakes, names

_LENGTH = "${model.encoder_seq_length}"  # NeMo-Aligner reads this value from its checkpoints


def lay_over(ours: DictConfig, theirs: DictConfig, recipe: Recipe, *, name: str) -> str:
    """Merge a configuration of NeMo-Aligner over ours and register the result with Hydra.

    ``hardware=...`` on the command line takes precedence over both.

    Args:
        ours: our configuration of the same algorithm.
        theirs: the configuration of NeMo-Aligner, whose values take precedence.
        recipe: the algorithm.
        name: name of the configuration of NeMo-Aligner.

    Returns:
        The name under which Hydra finds the merged configuration.
    """
    ours, theirs = ours.copy(), theirs.copy()
    for config in (ours, theirs):
        OmegaConf.set_struct(config, False)
    given = cast(dict[str, Any], OmegaConf.to_container(theirs))
    _drop_nulls(given, recipe)
    if (data := _section(given, ["model", "data"])).get("seq_length") == _LENGTH:
        data["seq_length"] = f"${{oc.select:model.encoder_seq_length,{ours.model.data.seq_length}}}"
    node = OmegaConf.to_container(OmegaConf.merge(ours, given))
    name = f"nemo_aligner_{name}"
    defaults = ["base/hydra", "_self_", {"hardware": None}]
    ConfigStore.instance().store(name=name, node={"defaults": defaults, **cast(dict[str, Any], node)})
    return name


def _drop_nulls(given: dict[str, Any], recipe: Recipe) -> None:
    """Remove keys that are null although their type does not allow it: NeMo-Aligner writes null for "not given"."""
    for key, field in names(config_type(recipe)).items():
        *above, last = key.split(".")
        section = _section(given, above)
        if section.get(last, "") is None and "null" not in field.alternatives:
            section.pop(last)


def _section(given: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return the section at a path, or an empty one if it does not exist."""
    section: object = given
    for name in path:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def brings_our_keys(file: Path) -> bool:
    """Return whether the defaults of a file include one of our files that no file in its own folder shadows."""
    try:
        content = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError:
        return False  # composing reports the error
    brought = content.get("defaults") if isinstance(content, dict) else None
    ours = [recipe.config_name for recipe in RECIPES.values()]
    names_brought = brought if isinstance(brought, list) else []
    return any(name in ours and not file.with_name(f"{name}.yaml").is_file() for name in names_brought)


def key_lines(file: Path) -> dict[str, int]:
    """Return dotted name -> line number, counted from 1, for all keys of a YAML file."""
    return dict(_key_lines(yaml.compose(file.read_bytes()), ""))


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from _key_lines(value, f"{prefix}{name.value}.")


PACKAGE = "nemo_kto.conf"
Judge = Callable[[DictConfig, DictConfig], list[ConfigError]]  # (configuration, configuration with valid values) -> errors
_FREE_FORM = ("model.data.data_prefix", "model.data.fields")  # may be mappings with arbitrary keys
_UNDER_FREE_FORM = tuple(f"{key}." for key in _FREE_FORM)
# Raised by Hydra if files or overrides do not compose; the last three for a file that is not text or includes itself.
WRONG = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, RecursionError, OSError)
# For expressions in the YAML files.
OmegaConf.register_new_resolver("multiply", lambda *factors: math.prod(factors), replace=True)
OmegaConf.register_new_resolver("int_div", operator.floordiv, replace=True)


def config_path() -> str:
    """Return the location of the YAML files as hydra.main takes it: the installed package, or conf/ in a bare checkout."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return f"pkg://{PACKAGE}"
    return str(Path(__file__).resolve().parents[2] / "conf")


class Source(NamedTuple):
    """The location of the configuration as given on the command line (Hydra's flags of the same names)."""

    config_name: str = next(iter(RECIPES.values())).config_name
    config_path: str | None = None
    config_dir: str | None = None

    def flags(self) -> list[str]:
        """Return the equivalent command-line flags."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self._asdict().items() if value is not None]


DEFAULT_SOURCE = Source()


class _Compose(NamedTuple):
    """Composer of configurations from overrides, with the same search path as hydra.main."""

    config_name: str
    search: list[str]

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        texts = [migration.forced(text, [*RECIPES]) for text in overrides]
        try:
            return compose(self.config_name, overrides=[*self.search, *texts])
        except WRONG:
            raise
        except (ValueError, yaml.YAMLError) as error:  # a file that is not YAML, or whose defaults are not a list
            raise HydraException(" ".join(str(error).split())) from error

    def choices(self, key: str) -> list[str]:
        """Return the options of a config group such as ``hardware``."""
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(key.split("@")[0], config_name=self.config_name, overrides=self.search)


def own_file(source: Source) -> Path | None:
    """Return the user's configuration file; None if the source is one of our files."""
    files = [Path(folder, f"{source.config_name}.yaml") for folder in (source.config_dir, source.config_path) if folder]
    return next((file for file in files if file.is_file()), None)


def adopted(source: Source) -> Source:
    """Return a source that completes a configuration of NeMo-Aligner with our defaults; any other source unchanged."""
    file = own_file(source)
    if file is None or brings_our_keys(file):
        return source
    try:
        with _opened_as_it_is(source) as composed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NeMo-Aligner's files lack _self_ in their defaults
            theirs = composed([])
        sections = [section for name in ("trainer", "model") if isinstance(section := theirs.get(name), DictConfig)]
        recipe = next((each for each in RECIPES.values() if any(each.name in section for section in sections)), None)
        if recipe is None or "algorithm" in theirs:
            return source
        return Source(lay_over(load(source=Source(recipe.config_name)), theirs, recipe, name=source.config_name))
    except WRONG:
        return source  # find_mistakes reports the error


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[_Compose]:
    with _opened_as_it_is(adopted(source)) as composed:
        yield composed


@contextlib.contextmanager
def _opened_as_it_is(source: Source) -> Iterator[_Compose]:
    place, search = source.config_path or config_path(), []
    if source.config_dir is not None:
        url = place if place.startswith("pkg://") else f"file://{os.path.abspath(place)}"
        place, search = source.config_dir, [f"hydra.searchpath=['{url}']"]
    package = place.removeprefix("pkg://")
    GlobalHydra.instance().clear()
    with (
        initialize_config_dir(os.path.abspath(place), version_base="1.3")
        if package == place
        else initialize_config_module(package, version_base="1.3")
    ):
        yield _Compose(source.config_name, search)


def recipe_of(config: DictConfig) -> Recipe:
    """Return the algorithm of a composed configuration.

    Raises:
        UserError: If the defaults include none of our files.
    """
    name = config.get("algorithm")
    if name not in RECIPES:
        known = either([recipe.config_name for recipe in RECIPES.values()])
        raise UserError(f"its defaults must begin with {known}, which bring the keys")
    return RECIPES[name]


def load(overrides: Sequence[str] = (), *, source: Source = DEFAULT_SOURCE) -> DictConfig:
    """Compose the configuration with Hydra, without resolving or checking it."""
    with _opened(source) as composed:
        return composed(overrides)


def to_config(
    config: DictConfig, *, recipe: Recipe | None = None, fallback: DictConfig | None = None
) -> tuple[RunConfig | None, list[ConfigError]]:
    """Resolve a configuration and convert it to its type.

    Args:
        config: the composed configuration.
        recipe: the algorithm; by default that of ``config``.
        fallback: a configuration whose values replace invalid ones.

    Returns:
        The typed configuration, and all errors. Without ``fallback``, an invalid configuration gives None.
    """
    recipe, config = recipe or recipe_of(config), config.copy()
    OmegaConf.set_struct(config, False)
    found: list[ConfigError] = []
    for _ in range(4):  # invalid values, then values interpolated from them, then remaining errors
        values, errors = _resolved(config)
        errors += [verdict.error for verdict in migration.judge(values, recipe.name) if verdict.error is not None]
        values = {key: value for key, value in values.items() if migration.aligner_key(key, recipe.name) is None}
        loss = _find_loss(values, recipe, errors)
        typed, wrong_values = _typed(values, recipe, loss)
        errors += [error for error in wrong_values if error.key not in {earlier.key for earlier in errors}]
        if typed is not None and not errors:
            return typed, found
        direct = [error for error in errors if not OmegaConf.is_interpolation(*_parent(config, error.key))] or errors
        known, new = {error.key for error in found}, {error.key for error in direct}
        found += [error for error in direct if error.key not in known and (known | new).isdisjoint(error.reads)]
        if fallback is None:
            break
        for key in new:
            _replace(config, key, fallback)
    return None, found


def notes(config: DictConfig) -> list[str]:
    """Return the notes on a valid configuration: keys of NeMo-Aligner that have no effect."""
    values, _ = _resolved(config)
    return [verdict.note for verdict in migration.judge(values, recipe_of(config).name) if verdict.note is not None]


def _resolved(config: DictConfig) -> tuple[dict[str, object], list[ConfigError]]:
    """Return dotted name -> resolved value for all keys, ??? for required keys not given; and resolution errors."""
    values: dict[str, object] = {}
    errors = []
    for key in known_keys(config):
        try:
            value = "???" if OmegaConf.is_missing(*_parent(config, key)) else OmegaConf.select(config, key)
            values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except Exception as error:  # a resolver may raise anything
            errors.append(ConfigError(key, f"does not resolve: {reason(error)}"))
    return values, errors


def _find_loss(values: Mapping[str, object], recipe: Recipe, errors: list[ConfigError]) -> Loss | None:
    """Return the loss that preference_loss names; if there is none, append an error and return None."""
    key = f"model.{recipe.name}.preference_loss"
    try:
        return recipe.find_loss(echo(values[key])) if key in values else None
    except UserError as error:
        errors.append(ConfigError(key, str(error)))
        return None


def _typed(values: Mapping[str, object], recipe: Recipe, loss: Loss | None) -> tuple[RunConfig | None, list[ConfigError]]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        section = nested
        for name in above:
            section = section.setdefault(name, {})
        if value != "???":
            section[last] = value
    types = config_type(recipe, loss)
    try:
        return types.model_validate(nested), []
    except ValidationError as error:
        found, known = mistakes(error, types, values), list(names(types))
        return None, [it if it.text else _unknown(it.key, _got(it.key, values), known, recipe) for it in found]


def _got(key: str, values: Mapping[str, object]) -> str:
    """Return the value of an unknown key as text; for an unknown section, its first key with its value."""
    below = next((name for name in values if name.startswith(f"{key}.")), None)
    return echo(values.get(key)) if below is None else f"{below}={echo(values[below])}"


def _replace(config: DictConfig, key: str, fallback: DictConfig) -> None:
    """Replace an invalid value with the value from another configuration."""
    section, last = _parent(config, key)
    other, _ = _parent(fallback, key)
    if other is None or last not in other.keys():  # noqa: SIM118  (a mapping of omegaconf does not hold what is missing)
        section.pop(last)
    else:
        section[last] = "?" if OmegaConf.is_missing(other, last) else OmegaConf.select(fallback, key)


def _parent(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    section, _, last = key.rpartition(".")
    return (OmegaConf.select(config, section) if section else config), last


def known_keys(config: DictConfig, *, sections: bool = False, prefix: str = "") -> list[str]:
    """Return the dotted names of all values (and, with ``sections``, of all sections) in the order of the files."""
    keys = []
    for name in map(str, config):
        given = not (OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name))
        section = config[name] if given and f"{prefix}{name}" not in _FREE_FORM else None
        if sections or not isinstance(section, DictConfig):
            keys.append(f"{prefix}{name}")
        if isinstance(section, DictConfig):
            keys.extend(known_keys(section, sections=sections, prefix=f"{prefix}{name}."))
    return keys


def find_mistakes(
    overrides: Sequence[str], *, source: Source, recipe: Recipe, judge: Judge, sweep: bool = False
) -> list[ConfigError]:
    """Find all errors in a command line.

    Args:
        overrides: the overrides on the command line.
        source: location of the configuration.
        recipe: the algorithm.
        judge: finds the errors in a configuration; its second argument has valid values to replace invalid ones.
        sweep: whether a key may have several values; each is checked together with the first values of the other keys.
    """
    ours, file = Source(recipe.config_name), f"{source.config_name}.yaml"
    fallback = load(source=ours)
    with _opened(source) as composed:
        try:
            basis = fallback if source == ours else composed([])
            found = recipe_of(basis)
        except (UserError, *WRONG) as error:
            return [ConfigError(file, f"does not compose: {reason(error)}")]
        if found is not recipe:
            text = f"must be a configuration for {recipe.name}, got one for {found.name}; run `nemo-kto {found.name}`"
            return [ConfigError(file, text)]
        errors: list[ConfigError] = []
        good: list[list[str]] = []
        for text in overrides:
            values = _read(text, basis, composed, recipe, sweep)
            if isinstance(values, ConfigError):
                errors.append(values)
            else:
                good.append(values)
        first = [values[0] for values in good]
        jobs = [first, *([*first[:i], value, *first[i + 1 :]] for i, values in enumerate(good) for value in values[1:])]
        for job in jobs:
            faults: dict[str, ConfigError] = {}
            try:
                try:
                    config = composed(job) if job else basis
                except WRONG:
                    faults = {text: fault for text in job if (fault := _fault(text, composed, recipe))}
                    config = composed([text for text in job if text not in faults])
                errors += [*faults.values(), *judge(config, fallback)]
            except WRONG as error:
                errors += faults.values() or [ConfigError("The overrides", f"do not go together: {reason(error)}")]
    errors = _located(errors, source, overrides)
    order = {text.lstrip("+~-").split("=")[0]: place for place, text in reversed([*enumerate(overrides)])}
    return sorted(dict.fromkeys(errors), key=lambda wrong: order.get(wrong.key, len(order)))


def _located(errors: Sequence[ConfigError], source: Source, overrides: Sequence[str]) -> list[ConfigError]:
    """Return the errors with file and line added for keys set in the user's file and not on the command line."""
    file, given = own_file(source), {text.lstrip("+~-").split("=")[0] for text in overrides}
    lines = {} if file is None else key_lines(file)
    places = {key: f"({file}:{line}) " for key, line in lines.items() if key not in given}
    return [error._replace(text=places.get(error.key, "") + error.text) for error in errors]


def _read(text: str, basis: DictConfig, composed: _Compose, recipe: Recipe, sweep: bool) -> ConfigError | list[str]:
    """Parse an override; return it, or all overrides of a sweep, or the error in its form or key."""
    name = text.split("=")[0]
    if not name.strip("+~ "):
        return ConfigError("An override", f"must be written KEY=VALUE, got {text!r}; give the key")
    known = [*names(config_type(recipe)), *known_keys(basis, sections=True)]
    if name.startswith("--"):  # as on the command lines of other trainers
        key = name.removeprefix("--")
        remedy = f"must be written KEY=VALUE, without hyphens before it, got {text}"
        return ConfigError(key, remedy) if key in known else _unknown(key, text, known, recipe)
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except OverrideParseException:
        if "=" not in text:
            return ConfigError(name, f"must be written KEY=VALUE, got {text}")
        return ConfigError(name, f"has a value that cannot be read, got {text}; put it in quotes: '{name}=\"...\"'")
    key = override.key_or_group
    options = override.is_add() and key.rpartition(".")[0] == f"model.{recipe.name}"  # may be options of a user-defined loss
    foreign = migration.aligner_key(key, recipe.name) is not None
    free = key.startswith(("hydra.", "hydra/", *_UNDER_FREE_FORM))
    if not (key in known or foreign or options or free or composed.choices(key)):
        return _unknown(key, text, known, recipe)
    if override.is_delete():
        return ConfigError(key, f"cannot be deleted, got {text}; set it to another value")
    if not override.is_sweep_override():
        return [text]
    if not sweep:
        remedy = "write [a,b] for a list, or add --multirun for a sweep"
        return ConfigError(key, f"must have one value, got {text}; {remedy}")
    return [f"{name}={value}" for value in override.sweep_string_iterator()]


def _fault(text: str, composed: _Compose, recipe: Recipe) -> ConfigError | None:
    """Return the error if Hydra cannot apply an override; otherwise None."""
    key, _, value = text.lstrip("+").partition("=")
    try:
        composed([text])
    except MissingConfigException:
        return ConfigError(key, f"must be one of {', '.join(composed.choices(key))}, got {value}")
    except WRONG as error:
        if (field := names(config_type(recipe)).get(key)) is not None and field.section is not None:
            return ConfigError(key, f"must be {either(field.alternatives)}, got '{value}'")
        return ConfigError(key, f"cannot be set, got {text}: {reason(error)}")
    return None


def _unknown(key: str, got: str, known: Sequence[str], recipe: Recipe) -> ConfigError:
    of_loss = key.rpartition(".")[0] == f"model.{recipe.name}"
    reads = (f"model.{recipe.name}.preference_loss",) if of_loss else ()
    known = [name for name in known if not key.startswith(f"{name}.")]
    meant = migration.meant(key, recipe, known)
    if meant.words is not None:
        return ConfigError(key, f"{meant.words}, got {got}", reads)
    remedy = f"did you mean {meant.nearest}?" if meant.nearest else f"`nemo-kto {recipe.name} --help` lists all keys"
    if of_loss and got.startswith(key):
        remedy += f" (options of a loss of your own begin with a plus: +{got})"
    return ConfigError(key, f"is not a key of the configuration, got {got}; {remedy}", reads)


def reason(error: BaseException) -> str:
    """Return the message of a composition or resolution error, in one line and without Hydra's search paths."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).split("\n\nConfig search path")[0]
    text, _, where = text.partition("\n    full_key: ")
    text = " ".join(text.split()).rpartition("raised while composing config: ")[2].rstrip(".")
    return f"{text} ({where.splitlines()[0]})" if where else text
