"""Command-line overrides become one typed configuration; every override that is wrong is found, not the first one alone."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import types
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, SCMode
from omegaconf.errors import OmegaConfBaseException

from nemo_kto.launch.schema import ALGORITHMS, KTO, Algorithm, RunConfig, blank
from nemo_kto.launch.validate import Problem

PACKAGE = "nemo_kto.conf"
_FREE_FORM = "model.data.data_prefix"  # may be a mapping, so anything may lie under it
_PATHS = (
    "exp_manager.exp_dir",
    "exp_manager.explicit_log_dir",
    "pretrained_checkpoint.restore_from_path",
    "model.data.cache_dir",
    "model.reference.restore_from_path",
    "model.peft.restore_from_path",
    "export.path",
    "export.adapter_path",
)


def register() -> None:
    """Make the resolvers and the types known; may be called any number of times."""
    OmegaConf.register_new_resolver("multiply", _multiply, replace=True)
    OmegaConf.register_new_resolver("int_div", lambda dividend, divisor: dividend // divisor, replace=True)
    for algorithm in ALGORITHMS.values():
        ConfigStore.instance().store(name=f"{algorithm.name}_schema", node=blank(algorithm.config_type))


def _multiply(*factors: Any) -> Any:
    product = 1
    for factor in factors:
        product *= factor
    return product


def config_path() -> str:
    """Where the YAML files are, in the form hydra.main takes: the installed package, or conf/ of a bare checkout."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return f"pkg://{PACKAGE}"
    return str(Path(__file__).resolve().parents[2] / "conf")


class Source(NamedTuple):
    """What the command line says about where configurations come from (Hydra's flags of the same names)."""

    config_name: str = KTO.config_name
    config_path: str | None = None
    config_dir: str | None = None


DEFAULT_SOURCE = Source()


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[None]:
    """Let ``hydra.compose`` find what hydra.main would find; its public ways know of one place only."""
    register()
    version.setbase("1.3")
    path = source.config_path or config_path()
    places = create_config_search_path(path if path.startswith("pkg://") else os.path.abspath(path))
    if source.config_dir is not None:
        found = SearchPathQuery(provider="schema")
        places.prepend(provider="command-line", path=f"file://{os.path.abspath(source.config_dir)}", anchor=found)
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2(task_name="nemo-kto", config_search_path=places)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def algorithm_of(config: DictConfig) -> Algorithm:
    """What a composed configuration is of.

    Raises:
        HydraException: none of the known schemas is among its defaults.
    """
    found = OmegaConf.get_type(config)
    for algorithm in ALGORITHMS.values():
        if found is algorithm.config_type:
            return algorithm
    schemas = " or ".join(f"{algorithm.config_name}" for algorithm in ALGORITHMS.values())
    raise HydraException(f"its defaults must begin with {schemas}, which bring the types of the keys")


def load(overrides: Sequence[str] = (), *, source: Source = DEFAULT_SOURCE) -> DictConfig:
    """The configuration as Hydra composes it, nothing resolved or checked beyond types."""
    with _opened(source):
        return compose(source.config_name, overrides=list(overrides))


def check_overrides(
    overrides: Sequence[str], *, source: Source = DEFAULT_SOURCE, sweep: bool = False
) -> tuple[DictConfig, list[Problem]]:
    """The configuration that the good overrides give, and what is wrong with the others.

    Args:
        overrides: as on the command line.
        source: where configurations come from.
        sweep: several values for a key are allowed; each is looked at, the first one is taken.

    Raises:
        HydraException: the configuration itself does not compose.
    """
    with _opened(source):
        basis = compose(source.config_name, overrides=[])
        good: list[str] = []
        problems: list[Problem] = []
        forms = [_read(text, basis, sweep) for text in overrides]
        if not any(problem or len(values) > 1 for problem, values in forms):  # most often all is well
            with contextlib.suppress(HydraException, OmegaConfBaseException):
                return compose(source.config_name, overrides=list(overrides)), []
        for problem, values in forms:
            wrong = [_try(value, source, algorithm_of(basis).config_type) for value in values]
            found = [problem] if problem else [mistake for mistake in wrong if mistake is not None]
            problems.extend(found)
            good.extend(values[:1] if not found else [])
        try:
            return compose(source.config_name, overrides=good), problems
        except (HydraException, OmegaConfBaseException) as error:  # right one by one, wrong together
            return basis, [*problems, Problem("The overrides", f"do not go together: {reason(error)}")]


def _read(text: str, basis: DictConfig, sweep: bool) -> tuple[Problem | None, list[str]]:
    """What is wrong with the form or the key of an override; and the override, or all of a sweep."""
    name = text.split("=")[0]
    try:
        override = _parse(text)
    except OverrideParseException:
        if "=" not in text:
            return Problem(name, f"must be written KEY=VALUE, got {text}"), []
        remedy = f"put it in quotes: '{name}=\"...\"'"
        return Problem(name, f"has a value that cannot be read, got {text}; {remedy}"), []
    if not _is_known(override.key_or_group, basis):
        return _unknown(override, basis), []
    if not override.is_sweep_override():
        return None, [text]
    if not sweep:
        remedy = "write [a,b] for a list, or add --multirun for a sweep"
        return Problem(override.key_or_group, f"must have one value, got {text}; {remedy}"), []
    return None, [f"{name}={value}" for value in override.sweep_string_iterator()]


def _parse(text: str) -> Override:
    return OverridesParser.create().parse_overrides([text])[0]


def _try(text: str, source: Source, config_type: type[RunConfig]) -> Problem | None:
    """What is wrong with the value of an override."""
    override = _parse(text)
    try:
        compose(source.config_name, overrides=[text])
    except MissingConfigException:
        options = GlobalHydra.instance().config_loader().get_group_options(override.key_or_group)
        return Problem(override.key_or_group, f"must be one of {', '.join(options)}, got {override.value()}")
    except (HydraException, OmegaConfBaseException) as error:
        return _wrong_value(text, override, error, config_type)
    return None


def _is_known(key: str, basis: DictConfig) -> bool:
    if key.startswith(("hydra.", "hydra/", f"{_FREE_FORM}.")) or key in known_keys(basis, sections=True):
        return True
    return bool(GlobalHydra.instance().config_loader().get_group_options(key.split("@")[0]))


def known_keys(config: Any, *, sections: bool = False, prefix: str = "") -> list[str]:
    """Dotted names of all values (and, with ``sections``, of what holds them), in the order of the files."""
    keys = []
    for name in config:
        node = config._get_node(name)
        section = isinstance(node, DictConfig) and not node._is_missing() and f"{prefix}{name}" != _FREE_FORM
        if sections or not section:
            keys.append(f"{prefix}{name}")
        if section:
            keys.extend(known_keys(node, sections=sections, prefix=f"{prefix}{name}."))
    return keys


def _unknown(override: Override, basis: DictConfig) -> Problem:
    key = override.key_or_group
    nearest = _nearest(key, known_keys(basis, sections=True))
    remedy = f"did you mean {nearest}?" if nearest else f"`nemo-kto {algorithm_of(basis).name} --help` lists all keys"
    return Problem(key, f"is not a key of the configuration, got {override.input_line}; {remedy}")


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """The known key that was most likely meant: the same last name elsewhere, or a few letters apart."""
    last = key.rsplit(".", 1)[-1]
    elsewhere = [name for name in known if name.rsplit(".", 1)[-1] == last]
    if elsewhere:
        return max(elsewhere, key=lambda name: difflib.SequenceMatcher(None, key, name).ratio())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if close:
        return close[0]
    by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    close = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.75)
    return by_last[close[0]] if close else None


def _wrong_value(text: str, override: Override, error: Exception, config_type: type[RunConfig]) -> Problem:
    key = override.key_or_group
    expected = _describe(_hint(key, config_type))
    if override.is_delete():
        return Problem(key, f"cannot be deleted, got {text}; set it to another value")
    if expected is None:
        return Problem(key, f"cannot be set, got {text}: {reason(error)}")
    value = override.value()
    if isinstance(value, str | QuotedString):
        return Problem(key, f"must be {expected}, got '{getattr(value, 'text', value)}'")
    got = (
        {None: "null", True: "true", False: "false"}.get(value, value) if value is None or isinstance(value, bool) else value
    )
    return Problem(key, f"must be {expected}, got {got}")


def reason(error: BaseException) -> str:
    """Why something does not compose or resolve, in one line and without Hydra's search paths."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).split("\n\nConfig search path")[0]
    text, _, where = text.partition("\n    full_key: ")
    text = " ".join(text.split()).rpartition("raised while composing config: ")[2].rstrip(".")
    return f"{text} ({where.splitlines()[0]})" if where else text


def _hint(key: str, config_type: type[RunConfig]) -> Any:
    """The type of a key; None if it is not in the schema."""
    hint: Any = config_type
    for name in key.split("."):
        hint = get_type_hints(hint).get(name) if isinstance(hint, type) and is_dataclass(hint) else None
    return hint


def _describe(hint: Any) -> str | None:
    """A type in words."""
    if isinstance(hint, type) and is_dataclass(hint):
        return f"a section with the keys {', '.join(get_type_hints(hint))}"
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
        if set(members) == {int, float}:
            return "a number"
        return " or ".join(_describe(member) or "" for member in members)
    if get_origin(hint) is list:
        return f"a list of {str(_describe(get_args(hint)[0])).removeprefix('a ')}s"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
    return words.get(hint)


def to_config(config: DictConfig) -> tuple[RunConfig | None, list[Problem]]:
    """The typed configuration with everything resolved and ~ expanded.

    Values that were to be given and were not are empty texts.

    Returns:
        The configuration and no problem; or None and what does not resolve.
    """
    config = config.copy()
    problems = []
    for key in known_keys(config):
        if OmegaConf.is_missing(*_parent(config, key)):
            OmegaConf.update(config, key, "")
        try:
            value = OmegaConf.select(config, key, throw_on_missing=True)
        except Exception as error:  # a resolver may raise anything
            problems.append(Problem(key, f"does not resolve: {reason(error)}"))
            continue
        if key in _PATHS and value is not None:
            OmegaConf.update(config, key, os.path.expanduser(value))
        if key == _FREE_FORM:
            OmegaConf.update(config, key, _expand(value), merge=False)
    if problems:
        return None, problems
    typed = OmegaConf.to_container(config, resolve=True, structured_config_mode=SCMode.INSTANTIATE)
    assert isinstance(typed, RunConfig)
    return typed, []


def _parent(config: DictConfig, key: str) -> tuple[Any, str]:
    section, _, last = key.rpartition(".")
    return (OmegaConf.select(config, section) if section else config), last


def _expand(value: Any) -> Any:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {name: _expand(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_expand(part) for part in value]
    return os.path.expanduser(value) if isinstance(value, str) else value
