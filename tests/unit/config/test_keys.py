"""The YAML files contain each key of the types once, with a comment, and the documentation page is generated from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from nemo_kto.algorithms.recipes import DPO, KTO, RECIPES, Recipe
from nemo_kto.config import compose, keys
from nemo_kto.config.schema import config_type
from nemo_kto.utils.field_errors import names

REPOSITORY = Path(__file__).resolve().parents[3]


def leaves(recipe: Recipe) -> list[str]:
    return [name for name, field in names(config_type(recipe)).items() if field.section is None]


def defaults(recipe: Recipe, *overrides: str) -> DictConfig:
    return compose.load(overrides, source=compose.Source(config_name=recipe.config_name))


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
    assert sorted(names) == sorted(keys.TABLES), "each table is on one page"
    assert [page.name for page, text in pages.items() if keys.with_tables(text) != text] == [], (
        "python -m nemo_kto.config.keys docs/*/*.md"
    )


def test_the_page_lists_shared_keys_once() -> None:
    tables: dict[str, list[str]] = {}
    for line in keys.key_tables().splitlines():
        if line.startswith("## "):
            tables[line.removeprefix("## ")] = []
        elif match := re.match(r"\| `([\w.]+)` \|", line):
            tables[[*tables][-1]].append(match[1])
    assert list(tables) == [
        "trainer", "exp_manager", "pretrained_checkpoint", "model", "export", "Only `nemo-kto kto`", "Only `nemo-kto dpo`",
    ]  # fmt: skip
    shared = [name for title, names in tables.items() if not title.startswith("Only") for name in names]
    for recipe in RECIPES.values():
        own = tables[f"Only `nemo-kto {recipe.name}`"]
        assert sorted(shared + own) == sorted(leaves(recipe))  # each once


def read(name: str, code: str) -> bool:
    """True where code takes an attribute of that name, or names it for getattr."""
    return re.search(rf'\.{name}\b|"{name}"', code) is not None


def test_every_key_is_used(recipe: Recipe) -> None:
    """No key may be accepted without effect."""
    package = REPOSITORY / "nemo_kto"
    others = (package / f"{name}.py" for name in ("config/resolved", "cli/job", f"algorithms/recipes/{recipe.name}"))
    files = (*(package / "run").glob("*.py"), *others)
    code = "".join(file.read_text() for file in files)
    parts = ("wandb_logger_kwargs", "mlflow_logger_kwargs", "checkpoint_callback_params")
    handed_on_whole = (*(f"exp_manager.{part}." for part in parts), f"trainer.{recipe.name}.")
    only_one_value = {  # schema.py refuses all others
        "model.optim.name",
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


@pytest.mark.parametrize(
    ("recipe", "own"),
    [
        (
            KTO,
            {
                "algorithm": "kto",
                "model.kto.preference_loss": "kto",
                "model.kto.desirable_loss_weight": "1.0",
                "model.kto.undesirable_loss_weight": "1.0",
                "model.kto.auto_balance": "false",
                "exp_manager.name": "gpt_kto",
            },
        ),
        (
            DPO,
            {
                "algorithm": "dpo",
                "model.micro_batch_size": "null",  # counts pairs there
                "model.global_batch_size": "64",
                "model.dpo.preference_loss": "dpo",
                "model.dpo.label_smoothing": "null",
                "model.dpo.exo_label_smoothing": "null",
                "model.dpo.discopop_tau": "null",
                "model.dpo.gt_reward_scale": "null",
                "model.dpo.simpo_gamma": "null",
                "model.dpo.orpo_sft_weight": "null",
                "model.dpo.sft_token_mean": "false",
                "model.dpo.sft_completion_only": "true",
                "model.data.default_chosen_reward": "null",
                "model.data.default_rejected_reward": "null",
                "exp_manager.name": "gpt_dpo",
            },
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_algorithm_files_do_not_repeat_shared_keys(recipe: Recipe, own: dict[str, str]) -> None:
    file = REPOSITORY / "conf" / f"{recipe.config_name}.yaml"
    assert {key.name: key.default for key in keys._keys(file.read_text(), "")} == own


def test_comments_of_an_algorithm_file_have_priority() -> None:
    """The shared file says examples; all_keys must give the comment of the algorithm's file."""
    comments = {key.name: key.comment for key in keys.all_keys(DPO)}
    null = "null: as many as micro_batch_tokens allows"
    assert comments["model.micro_batch_size"] == f"pairs of one forward and backward pass; {null}"
    assert comments["model.global_batch_size"] == "pairs of one optimizer step, over all ranks"
    assert comments["model.dpo.log_prob_forward_micro_batch_size"] == (
        "sequences of one forward pass without gradient; null: those of a micro-batch, so that equal models give equal "
        "log-probs"
    )
    assert {key.name: key.comment for key in keys.all_keys(KTO)}["model.micro_batch_size"] == (
        f"examples of one forward and backward pass; {null}"
    )


def test_hardware_files_compose(recipe: Recipe) -> None:
    names = sorted(file.stem for file in (REPOSITORY / "conf" / "hardware").glob("*.yaml"))
    assert names == ["cpu", "gpu_node"]
    for name in names:
        defaults(recipe, f"hardware={name}")
