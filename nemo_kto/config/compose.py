"""Composition of the configuration with Hydra, including files of NeMo-Aligner, and conversion to its type."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
import operator
import os
import pickle  # nosec B403
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from pydantic import ValidationError

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config import migration
from nemo_kto.config.learning_rates import DEFAULT_LR
from nemo_kto.config.schema import RunConfig, config_type
from nemo_kto.errors import ConfigError, UserError, either
from nemo_kto.utils.fields import echo, mistakes, names
from nemo_kto.utils.files import load_yaml

PACKAGE = "nemo_kto.conf"
GROUPS = ("hardware", "recipe")  # config groups, of which one file each may be chosen; a later one takes precedence
# Raised by Hydra if files or overrides do not compose; the last three for a file that is not text or includes itself.
WRONG = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, RecursionError, OSError)
FREE_FORM = (  # may be mappings with arbitrary keys
    "model.data.data_prefix", "model.data.fields", "model.data.labels", "model.dpo.preference_losses",
)  # fmt: skip
# For expressions in the YAML files.
OmegaConf.register_new_resolver("default_lr", DEFAULT_LR.get, replace=True)
OmegaConf.register_new_resolver(
    "tenth_of", lambda lr: float(f"{lr / 10:.12g}") if isinstance(lr, int | float) else 0.0, replace=True
)
OmegaConf.register_new_resolver("multiply", lambda *factors: math.prod(factors), replace=True)
OmegaConf.register_new_resolver("int_div", operator.floordiv, replace=True)


def config_path() -> str:
    """Return the location of the YAML files for hydra.main: the installed package, or conf/ in a bare checkout."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return f"pkg://{PACKAGE}"
    return str(Path(__file__).resolve().parents[2] / "conf")


def config_folder() -> Traversable:
    """Return the folder of the YAML files."""
    path = config_path()
    return resources.files(PACKAGE) if path.startswith("pkg://") else Path(path)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The location of the configuration as given on the command line (Hydra's flags of the same names)."""

    config_name: str = next(iter(RECIPES.values())).config_name
    config_path: str | None = None
    config_dir: str | None = None
    # Choices of files -> pickled configuration: reading a pickle takes a sixth of the time of omegaconf's copy.
    _composed: dict[tuple[str, ...], bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def flags(self) -> list[str]:
        flags = {"config-name": self.config_name, "config-path": self.config_path, "config-dir": self.config_dir}
        return [f"--{name}={value}" for name, value in flags.items() if value is not None]

    @property
    def own_file(self) -> Path | None:
        """The user's configuration file; None if the source is one of our files."""
        files = [Path(folder, f"{self.config_name}.yaml") for folder in (self.config_dir, self.config_path) if folder]
        return next((file for file in files if file.is_file()), None)

    @functools.cached_property
    def adopted(self) -> Source:
        """The source with a file of NeMo-Aligner completed by our defaults; any other source unchanged."""
        if self.own_file is None or _includes_ours(self.own_file):
            return self
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NeMo-Aligner's files lack _self_ in their defaults
                theirs = self.compose()
            recipe = _aligner_recipe(theirs)
            return self if recipe is None else _registered(_over_ours(theirs, recipe), name=self.config_name)
        except WRONG:
            return self  # find_mistakes reports the error

    def compose(self, overrides: Sequence[str] = ()) -> DictConfig:
        """Compose the files of this source, without resolving or checking the result; raise one of :data:`WRONG`.

        Hydra composes the files that the overrides choose, each choice once; the other overrides are set in the result.
        """
        with _hydra_errors():
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            is_value = [self._is_value(override) for override in parsed]
            choices = tuple(migration.forced(text) for text, value in zip(overrides, is_value, strict=True) if not value)
            if choices not in self._composed:
                with self._opened() as search:
                    self._composed[choices] = pickle.dumps(compose(self.config_name, overrides=[*search, *choices]))
        config: DictConfig = pickle.loads(self._composed[choices])  # nosec B301
        for override in itertools.compress(parsed, is_value):
            _set_value(config, override)
        return config

    def _is_value(self, override: Override) -> bool:
        """Return whether an override sets the value of a key, rather than choosing a file or concerning Hydra itself."""
        key = override.key_or_group
        plain = override.package is None and not override.is_delete() and not override.is_sweep_override()
        return plain and not key.startswith("hydra.") and not self._may_be_group(key)

    def _may_be_group(self, key: str) -> bool:
        """Return whether a key may be a config group: a folder, which a user may have anywhere in Hydra's search path."""
        if "." in key or "/" in key:
            return "/" in key
        return self.config_path is not None or self.config_dir is not None or (config_folder() / key).is_dir()

    def choices(self, group: str) -> list[str]:
        """Return the options of a config group such as ``hardware``; none for other keys."""
        if not self._may_be_group(group):
            return []
        with self._opened() as search:
            loader = GlobalHydra.instance().config_loader()
            return loader.get_group_options(group.split("@")[0], config_name=self.config_name, overrides=search)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[list[str]]:
        """Initialise Hydra with the search path of hydra.main; yield an override with further places to search."""
        place, search = self.config_path or config_path(), []
        if self.config_dir is not None:
            url = place if place.startswith("pkg://") else f"file://{os.path.abspath(place)}"
            place, search = self.config_dir, [f"hydra.searchpath=['{url}']"]
        package = place.removeprefix("pkg://")
        GlobalHydra.instance().clear()
        with (
            initialize_config_dir(os.path.abspath(place), version_base="1.3")
            if package == place
            else initialize_config_module(package, version_base="1.3")
        ):
            yield search


DEFAULT_SOURCE = Source()


@functools.cache
def our_source(recipe: Recipe) -> Source:
    """Return the source of an algorithm's file, which a process composes once."""
    return Source(config_name=recipe.config_name)


@contextlib.contextmanager
def _hydra_errors() -> Iterator[None]:
    """Raise Hydra's error for a file whose defaults are not a list, or that is no YAML."""
    try:
        yield
    except WRONG:
        raise
    except ValueError as error:
        raise HydraException(" ".join(str(error).split())) from error


# ---- files of NeMo-Aligner ----
# Such a file includes none of ours, and lacks most of our keys. Its values are merged over our file, and Hydra gets the
# result as one more file, so that a command line chooses config groups and sets values in it as in our own files.


def _includes_ours(file: Path) -> bool:
    """Return whether the defaults of a file include one of our files that no file in its own folder shadows."""
    try:
        content = load_yaml(file.read_bytes())
    except ValueError:
        return False  # composing reports the error
    defaults = content.get("defaults") if isinstance(content, dict) else None
    ours = [recipe.config_name for recipe in RECIPES.values()]
    return isinstance(defaults, list) and any(
        name in ours and not file.with_name(f"{name}.yaml").is_file() for name in defaults
    )


def _aligner_recipe(theirs: DictConfig) -> Recipe | None:
    """Return the algorithm of NeMo-Aligner that has a section in a file; None if there is none."""
    sections = [section for name in ("trainer", "model") if isinstance(section := theirs.get(name), DictConfig)]
    found = (recipe for recipe in RECIPES.values() if any(recipe.name in section for section in sections))
    return None if "algorithm" in theirs else next(found, None)


def _over_ours(theirs: DictConfig, recipe: Recipe) -> dict[str, Any]:
    """Return our configuration of an algorithm with the values of a file of NeMo-Aligner, where null means "not given"."""
    given = cast(dict[str, Any], OmegaConf.to_container(theirs))
    for key, known in names(config_type(recipe)).items():
        above, _, last = key.rpartition(".")
        section = _section(given, above)
        if section.get(last, "") is None and "null" not in known.alternatives:
            del section[last]
    data = _section(given, "model.data")
    if data.get("seq_length") == "${model.encoder_seq_length}":  # which NeMo-Aligner reads from its checkpoints
        data["seq_length"] = "${oc.select:model.encoder_seq_length}"
    ours = Source(config_name=recipe.config_name).compose()
    OmegaConf.set_struct(ours, False)
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(ours, given)))


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the section with a dotted name, the whole for an empty one; an empty section if there is none."""
    found: object = values
    for part in filter(None, name.split(".")):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _registered(values: dict[str, Any], *, name: str) -> Source:
    """Register a configuration with Hydra; its config groups, chosen on the command line, take precedence over it."""
    stored = f"nemo_aligner_{name}"
    defaults = ["base/hydra", "_self_", *({group: None} for group in GROUPS)]
    ConfigStore.instance().store(name=stored, node={"defaults": defaults, **values})
    return Source(config_name=stored)


def _set_value(config: DictConfig, override: Override) -> None:
    """Set a value as Hydra does; keys that NeMo-Aligner has need no plus."""
    key, value = override.key_or_group, override.value()
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=override.is_add() or override.is_force_add())
    except (ConfigAttributeError, ConfigKeyError):
        if migration.aligner_key(key) is None:
            raise
        OmegaConf.update(config, key, value, merge=True, force_add=True)


def recipe_of(config: DictConfig) -> Recipe:
    """Return the algorithm of a composed configuration; raise UserError if its defaults include none of our files."""
    name = config.get("algorithm")
    if name not in RECIPES:
        known = either([recipe.config_name for recipe in RECIPES.values()])
        raise UserError(f"must begin its defaults with {known}, which define the keys, got none of them")
    return RECIPES[name]


def is_auto(override: str) -> bool:
    """Return whether an override is recipe=auto, in whose place tools/plan/auto.py puts a layout."""
    return re.fullmatch(r"""recipe=(['"]?)auto\1""", override) is not None


def load(overrides: Sequence[str] = (), *, source: Source = DEFAULT_SOURCE) -> DictConfig:
    """Compose the configuration, completed with our defaults, without resolving or checking it; recipe=auto sets nothing."""
    return source.adopted.compose([text for text in overrides if not is_auto(text)])


def to_config(
    config: DictConfig, *, recipe: Recipe | None = None, fallback: DictConfig | None = None
) -> tuple[RunConfig | None, list[ConfigError]]:
    """Resolve a configuration and convert it to its type; return it with all errors.

    Values of ``fallback`` replace invalid ones; without it, an invalid configuration gives None.
    """
    recipe, config = recipe or recipe_of(config), config.copy()
    OmegaConf.set_struct(config, False)
    found: list[ConfigError] = []
    for _ in range(4):  # invalid values, then values interpolated from them, then remaining errors
        typed, errors = _typed(config, recipe)
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


def _typed(config: DictConfig, recipe: Recipe) -> tuple[RunConfig | None, list[ConfigError]]:
    """Return the typed configuration, None if a type does not fit, and all errors, one for each key."""
    values, errors = _resolved(config)
    ours = names(config_type(recipe))
    errors += [item for item in migration.judge(values, ours, recipe.name) if isinstance(item, ConfigError)]
    values = {key: value for key, value in values.items() if key in ours or migration.aligner_key(key) is None}
    loss, loss_key = None, f"model.{recipe.name}.preference_loss"
    try:
        loss = recipe.find_loss(echo(values[loss_key])) if loss_key in values else None
    except UserError as error:
        errors.append(ConfigError(loss_key, str(error)))
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        section = nested
        for name in above:
            section = section.setdefault(name, {})
        if value != "???":
            section[last] = value
    types = config_type(recipe, None if loss in recipe.losses.values() else loss)
    try:
        return types.model_validate(nested), errors
    except ValidationError as error:
        known, keys = list(names(types)), {earlier.key for earlier in errors}
        for wrong in mistakes(error, types, values):
            if not wrong.text:
                below = next((name for name in values if name.startswith(f"{wrong.key}.")), None)  # of an unknown section
                got = echo(values.get(wrong.key)) if below is None else f"{below}={echo(values[below])}"
                wrong = migration.unknown_key(wrong.key, got, known, recipe)
            errors += [] if wrong.key in keys else [wrong]
        return None, errors


def _resolved(config: DictConfig) -> tuple[dict[str, object], list[ConfigError]]:
    """Return dotted name -> resolved value for all keys, ??? for required keys not given; and resolution errors."""
    with contextlib.suppress(Exception):  # a resolver may raise anything; if one does, each key is resolved separately
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        return {key: functools.reduce(operator.getitem, key.split("."), resolved) for key in known_keys(config)}, []
    values: dict[str, object] = {}
    errors = []
    for key in known_keys(config):
        try:
            value = "???" if OmegaConf.is_missing(*_parent(config, key)) else OmegaConf.select(config, key)
            values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except Exception as error:  # a resolver may raise anything
            errors.append(ConfigError(key, f"does not resolve: {reason(error)}"))
    return values, errors


def _replace(config: DictConfig, key: str, fallback: DictConfig) -> None:
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
        section = config[name] if given and f"{prefix}{name}" not in FREE_FORM else None
        if sections or not isinstance(section, DictConfig):
            keys.append(f"{prefix}{name}")
        if isinstance(section, DictConfig):
            keys.extend(known_keys(section, sections=sections, prefix=f"{prefix}{name}."))
    return keys


def notes(config: DictConfig) -> list[str]:
    """Return the notes on a valid configuration: keys of NeMo-Aligner that have no effect."""
    values, recipe = _resolved(config)[0], recipe_of(config)
    found = migration.judge(values, names(config_type(recipe)), recipe.name)
    return [item for item in found if isinstance(item, str)]


def reason(error: BaseException) -> str:
    """Return the message of a composition or resolution error, in one line and without Hydra's search paths."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).split("\n\nConfig search path")[0]
    text, _, where = text.partition("\n    full_key: ")
    text = " ".join(text.split()).rpartition("raised while composing config: ")[2].rstrip(".")
    return f"{text} ({where.splitlines()[0]})" if where else text
