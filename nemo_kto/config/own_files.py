"""Configuration files of the user's own: where their keys stand, and those of NeMo-Aligner, which are laid over ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config.schema import config_type
from nemo_kto.utils.field_errors import names

_LENGTH = "${model.encoder_seq_length}"  # which NeMo-Aligner reads from its checkpoints


def lay_over(ours: DictConfig, theirs: DictConfig, recipe: Recipe, *, name: str) -> str:
    """The name under which Hydra finds the two merged, with their values over ours; ``hardware=...`` comes after both."""
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
    """Leave out what is null and cannot be: there null stands for "not given"."""
    for key, field in names(config_type(recipe)).items():
        *above, last = key.split(".")
        section = _section(given, above)
        if section.get(last, "") is None and "null" not in field.alternatives:
            section.pop(last)


def _section(given: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The section of that path; an empty one where there is none."""
    section: object = given
    for name in path:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def brings_our_keys(file: Path) -> bool:
    """Whether one of our files is among its defaults, and not one of the same name beside it."""
    try:
        content = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError:
        return False  # composing says why
    brought = content.get("defaults") if isinstance(content, dict) else None
    ours = [recipe.config_name for recipe in RECIPES.values()]
    names_brought = brought if isinstance(brought, list) else []
    return any(name in ours and not file.with_name(f"{name}.yaml").is_file() for name in names_brought)


def key_lines(file: Path) -> dict[str, int]:
    """Dotted name -> line, counted from 1, of all keys of a YAML file."""
    return dict(_key_lines(yaml.compose(file.read_bytes()), ""))


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from _key_lines(value, f"{prefix}{name.value}.")
