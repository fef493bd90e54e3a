"""The YAML files contain each key of the types once, with a comment, and the documentation page is generated from them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from omegaconf import DictConfig

from docs.site import tables
from nemo_kto.algorithms.recipes import Recipe
from nemo_kto.config import compose, keys
from nemo_kto.config.schema import config_type
from nemo_kto.utils.fields import names

REPOSITORY = Path(__file__).resolve().parents[3]


def leaves(recipe: Recipe) -> list[str]:
    return [name for name, field in names(config_type(recipe)).items() if field.section is None]


def defaults(recipe: Recipe, *overrides: str) -> DictConfig:
    return compose.load(overrides, source=compose.our_source(recipe))


def test_files_types_and_comments_have_the_same_keys(recipe: Recipe) -> None:
    documented = [key.name for key in keys.all_keys(recipe)]
    assert sorted(documented) == sorted(leaves(recipe))
    assert sorted(documented) == sorted(compose.known_keys(defaults(recipe)))
    assert len(documented) == len(set(documented))


def test_every_key_has_a_comment(recipe: Recipe) -> None:
    assert [key.name for key in keys.all_keys(recipe) if len(key.comment) < 8] == []


def test_defaults_equal_those_of_hydra(recipe: Recipe) -> None:
    config = defaults(recipe)
    for key in keys.all_keys(recipe):
        if "${" in key.default or key.default == "???":
            continue
        section, _, name = key.name.rpartition(".")
        node = compose.OmegaConf.select(config, section)
        expected = yaml.safe_load(key.default)
        assert node[name] == (float(expected) if isinstance(node[name], float) else expected), key.name


def test_the_tables_in_docs_are_up_to_date() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs").glob("*/*.md")}
    names = [match for text in pages.values() for match in re.findall("<!-- generated: (.*) -->", text)]
    assert sorted(names) == sorted(tables.TABLES), "each table is on one page"
    assert [page.name for page, text in pages.items() if tables.with_tables(text) != text] == [], (
        "python -m docs.site.generate"
    )


def read(name: str, code: str) -> bool:
    """True where code takes an attribute of that name, or names it for getattr."""
    return re.search(rf'\.{name}\b|"{name}"', code) is not None


def test_every_key_is_used(recipe: Recipe) -> None:
    """No key may be accepted without effect."""
    package = REPOSITORY / "nemo_kto"
    others = (
        package / f"{name}.py"
        for name in ("config/resolved", "cli/job", "memory/micro_batches", f"algorithms/recipes/{recipe.name}_recipe")
    )
    files = (*(package / "run").glob("*.py"), *others)
    code = "".join(file.read_text() for file in files)
    parts = ("trackio_logger_kwargs", "wandb_logger_kwargs", "mlflow_logger_kwargs", "checkpoint_callback_params")
    handed_on_whole = (*(f"exp_manager.{part}." for part in parts), f"trainer.{recipe.name}.")
    only_one_value = {  # all others are refused
        "model.optim.name",
        "model.data.reset_attention_mask",
        "model.data.eod_mask_loss",
    }
    within_yaml = {"exp_manager.exp_dir", "exp_manager.name", "algorithm"}  # explicit_log_dir is made of the first two
    by_name = {f"model.{recipe.name}.{option}" for loss in recipe.losses.values() for option in loss.options}
    by_name |= {f"model.data.{name}" for name in recipe.data_defaults}
    unread = [
        key.name
        for key in keys.all_keys(recipe)
        if not read(key.name.rsplit(".", 1)[-1], code) and not key.name.startswith(handed_on_whole)
    ]
    assert [name for name in unread if name not in only_one_value | within_yaml | by_name] == []


def test_hardware_files_compose(recipe: Recipe) -> None:
    names = sorted(file.stem for file in (REPOSITORY / "conf" / "hardware").glob("*.yaml"))
    assert names == ["cpu", "gpu_node"]
    for name in names:
        defaults(recipe, f"hardware={name}")
