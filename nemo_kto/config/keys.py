"""Configuration keys with defaults and comments, read from the YAML files.

`python -m nemo_kto.config.keys > docs/configuration.md` writes the page; a test compares the page with the files.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config.compose import PACKAGE, config_path
from nemo_kto.config.schema import config_type
from nemo_kto.utils.field_errors import names

_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>.*)")
_DEFAULTS = re.compile(r"^  - (base/(?!hydra$)\w+)(?:@([\w.]+))?$", re.MULTILINE)  # file, package


class Key(NamedTuple):
    """One key: dotted name, default as written, comment, description of type and constraints."""

    name: str
    default: str
    comment: str
    type: str = ""


def all_keys(recipe: Recipe) -> list[Key]:
    """Return every key of an algorithm's configuration once.

    Where the algorithm's file overrides a default, its line is used.
    """
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
    path = config_path()
    folder = resources.files(PACKAGE) if path.startswith("pkg://") else Path(path)
    return str((folder / f"{name}.yaml").read_text(encoding="utf-8"))


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


_INTRODUCTION = """\
# Configuration

Written by `python -m nemo_kto.config.keys` from the comments in `conf/` and the types in the code; edit those.

Every key can be given on the command line (`nemo-kto {name} model.optim.lr=1e-6 ...`), in a YAML file of your own
(`nemo-kto {name} --config-dir . --config-name mine`, where mine.yaml begins with `defaults: [gpt_{name}, _self_]`), or swept
over (`--multirun model.optim.lr=1e-6,3e-6`). `???` must be given. `hardware=cpu` and `hardware=gpu_node` set several keys
at once. `nemo-kto {name} --cfg job ...` prints the configuration of a command line. All mistakes are listed before
anything starts.
"""


def as_markdown() -> str:
    """Return the page docs/configuration.md: the keys common to all algorithms, then those specific to each."""
    keys = {recipe.name: all_keys(recipe) for recipe in RECIPES.values()}
    first, *others = keys.values()
    shared = [key for key in first if all(key in other for other in others)]
    lines = [_INTRODUCTION.format(name=next(iter(keys))).rstrip()]
    for section, group in itertools.groupby(shared, key=lambda key: key.name.split(".")[0]):
        lines += [*_table(section), *map(_line, group)]
    for name, own in keys.items():
        lines += [*_table(f"Only `nemo-kto {name}`"), *(_line(key) for key in own if key not in shared)]
    return "\n".join(lines) + "\n"


def _table(title: str) -> list[str]:
    return ["", f"## {title}", "", "| key | default | type | meaning |", "|---|---|---|---|"]


def _line(key: Key) -> str:
    return f"| `{key.name}` | `{key.default}` | {key.type} | {key.comment.replace('|', chr(92) + '|')} |"


def as_text(recipe: Recipe) -> str:
    """Return the keys formatted for the terminal."""
    return "\n".join(f"  {key.name}={key.default}\n      {key.comment}" for key in all_keys(recipe))


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
