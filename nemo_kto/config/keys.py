"""Configuration keys with defaults and comments, read from the YAML files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from nemo_kto.algorithms.recipes import Recipe
from nemo_kto.config.compose import config_folder
from nemo_kto.config.schema import config_type
from nemo_kto.utils.fields import names

_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>.*)")
_DEFAULTS = re.compile(r"^  - (base/(?!hydra$)\w+)(?:@([\w.]+))?$", re.MULTILINE)  # file, package


class Key(NamedTuple):
    """One key: dotted name, default as written, comment, description of type and constraints."""

    name: str
    default: str
    comment: str
    type: str = ""


def all_keys(recipe: Recipe) -> list[Key]:
    """Return every key of an algorithm's configuration once; lines of the algorithm's file override those of others."""
    text = _read(recipe.config_name)
    keys: dict[str, Key] = {}
    for file, package in _DEFAULTS.findall(text):
        prefix = f"{package}." if package else ""
        keys.update({key.name: key for key in _keys(_read(file), prefix)})
    keys.update({key.name: key for key in _keys(text, "")})
    order = list(dict.fromkeys(name.split(".")[0] for name in keys))
    types = names(config_type(recipe))
    typed = [key._replace(type=types[key.name].description) for key in keys.values()]
    return sorted(typed, key=lambda key: order.index(key.name.split(".")[0]))


def _read(name: str) -> str:
    return str((config_folder() / f"{name}.yaml").read_text(encoding="utf-8"))


def _keys(text: str, prefix: str) -> Iterator[Key]:
    """Yield the keys of one file; each level of sections is indented by two spaces."""
    above: list[str] = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or (not match["indent"] and match["name"] == "defaults"):
            continue
        above = [*above[: len(match["indent"]) // 2], match["name"]]
        value, _, comment = match["value"].partition(" # ")
        if value.strip():
            yield Key(prefix + ".".join(above), value.strip(), comment.strip())


def as_text(recipe: Recipe) -> str:
    """Return the keys formatted for the terminal."""
    return "\n".join(f"  {key.name}={key.default}\n      {key.comment}" for key in all_keys(recipe))
