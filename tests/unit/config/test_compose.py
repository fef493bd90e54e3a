"""Composition of overrides to a typed configuration, and errors of wrong overrides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_kto.algorithms.recipes import DPO, KTO, Recipe
from nemo_kto.cli.job import Job
from nemo_kto.config import compose
from nemo_kto.errors import UserError
from tests.helpers.messages import Message
from tests.unit.conftest import Load, composed, mistakes, of


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            "model.seed=7",
            "model.data.data_prefix={train: [a], validation: [0.5, b], test: []}",
            "model.optim.betas=[0,0.5]",
            "hardware=cpu",
            "trainer.precision=bf16",
            "model.optim.lr=nan",
            "model.reference.restore_from_path=null",
            "exp_manager.explicit_log_dir=''",
            "++model.mcore_gpt=true",
            "model.peft.lora_tuning.layer_selection=[1,30]",
            "model.data.data_prefix={train: [c]}",
            "trainer.devices=all",
        ],
    ],
    ids=["none", "many"],
)
def test_values_are_set_as_hydra_sets_them(recipe: Recipe, overrides: list[str]) -> None:
    ours = compose.load(overrides, source=compose.our_source(recipe))
    with initialize_config_module("nemo_kto.conf", version_base="1.3"):
        theirs = hydra_compose(recipe.config_name, overrides=overrides)
    assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(theirs)  # nan is not equal to itself
    assert compose.recipe_of(ours) is recipe


def test_files_are_composed_once_and_no_value_stays_in_them() -> None:
    source = compose.Source()
    with pytest.raises(OmegaConfBaseException, match="Key 'seeds' is not in struct"):
        source.compose(["model.seed=7", "model.seeds=3"])
    assert source.compose(["model.data.data_prefix={train: [a]}"]).model.seed == 1234
    assert source.compose(["hardware=cpu"]).trainer.accelerator == "cpu"
    assert OmegaConf.to_yaml(source.compose()) == OmegaConf.to_yaml(compose.Source().compose())


# An override of any algorithm and its error.
WRONG = [
    ("model.micro_batchsize=2", Message("model.micro_batchsize", "model.micro_batchsize=2", "model.micro_batch_size")),
    ("trainer.max_epochs=3", Message("trainer.max_epochs", "trainer.ALGORITHM.max_epochs", "1", "3", "set")),
    ("nothing=3", Message("nothing", "nothing=3", "ALGORITHM", "--help", "all")),
    (
        "++model.optim.sched.warmup=3",
        Message("model.optim.sched.warmup", "model.optim.sched.warmup_steps", "++model.optim.sched.warmup=3"),
    ),
    ("model.micro_batch_size=two", Message("model.micro_batch_size", "integer", "null", "two")),
    ("model.micro_batch_size=2.5", Message("model.micro_batch_size", "integer", "null", "2.5")),
    ("model.optim.betas=[0.9,x]", Message("model.optim.betas", "list", "0.9", "x")),
    ("model.reference.restore_from_path=[a]", Message("model.reference.restore_from_path", "string", "null", "['a']")),
    ("trainer.devices=[1]", Message("trainer.devices", "integer", "auto", "[1]")),
    ("hardware=tpu", Message("cpu", "gpu_node", "tpu")),
    ("~model.seed", Message("model.seed", "~model.seed", "set")),
    ("model.seed", Message("model.seed", "KEY=VALUE")),
    ("model.seed=1,2", Message("model.seed", "model.seed=1,2", "[a,b]", "list", "--multirun")),
    (
        "model.data.data_prefix=a b=c",
        Message("model.data.data_prefix", "model.data.data_prefix=a", "b=c", "quotes", 'model.data.data_prefix="..."'),
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("override", "text"), WRONG)
def test_a_wrong_override(recipe: Recipe, override: str, text: Message) -> None:
    assert mistakes([*of(recipe, [override]), "model.optim.weight_decay=0.5"], recipe) == of(recipe, [text])


def test_all_wrong_overrides_in_one_list() -> None:
    """Each for itself, as above, takes four times as long."""
    batches: list[dict[str, tuple[str, Message]]] = []  # a key counts once on a command line
    for override, text in WRONG:
        key = override.lstrip("+~").split("=")[0]
        batch = next((batch for batch in batches if key not in batch), {})
        batch[key] = (override, text)
        batches += [] if batch in batches else [batch]
    for batch in batches:
        overrides = of(KTO, [override for override, _ in batch.values()])
        assert mistakes([*overrides, "model.optim.weight_decay=0.5"]) == of(KTO, [text for _, text in batch.values()])


@pytest.mark.parametrize(
    ("recipe", "override", "text"),
    [
        (
            KTO,
            "model.dpo.preference_loss=ipo",
            Message("model.dpo.preference_loss", "model.dpo.preference_loss=ipo", "model.kto.preference_loss"),
        ),
        (
            KTO,
            "model.data.default_chosen_reward=2",
            Message("model.data.default_chosen_reward", "model.data.default_chosen_reward=2", "kto", "--help", "all"),
        ),
        (
            DPO,
            "trainer.kto.max_steps=3",
            Message("trainer.kto.max_steps", "trainer.kto.max_steps=3", "trainer.dpo.max_steps"),
        ),
        (
            DPO,
            "model.kto.auto_balance=true",
            Message("model.kto.auto_balance", "model.kto.auto_balance=true", "dpo", "--help", "all"),
        ),
        (DPO, "model.dpo.label_smoothing=x", Message("model.dpo.label_smoothing", "null", "x")),
        (DPO, "model.data.default_chosen_reward=x", Message("model.data.default_chosen_reward", "null", "x")),
    ],
)
def test_keys_of_the_other_algorithm(recipe: Recipe, override: str, text: str) -> None:
    assert mistakes([override], recipe) == [text]


def test_errors_are_listed_in_the_order_of_the_command_line(recipe: Recipe) -> None:
    overrides = ["model.seed=x", "model.micro_batch_size=4", "foo=1", "hardware=tpu", "model.global_batch_size=6"]
    job = Job(recipe=recipe, source=compose.our_source(recipe), world=None)
    found = job.checker(sweep=False).errors(overrides)
    keys = ["model.seed", "foo", "hardware", "model.global_batch_size"]  # which 4 does not divide
    assert [mistake.key for mistake in found] == [*keys, "pretrained_checkpoint.restore_from_path", "model.data.data_prefix"]


def test_an_invalid_key_takes_its_default_and_hides_derived_errors(recipe: Recipe) -> None:
    loss, dim = f"model.{recipe.name}.preference_loss", "model.peft.lora_tuning.adapter_dim"
    config = composed(["model.micro_batch_size=two", f"{dim}=four", "model.seed=7", f"{loss}=none"], recipe)
    cfg, found = compose.to_config(config, fallback=composed(["model.micro_batch_size=4", f"{dim}=8"], recipe))
    wrong = {mistake.key for mistake in found if "must be given" not in mistake.text}
    assert wrong == {"model.micro_batch_size", dim, loss}, "alpha, derived from adapter_dim, is not listed"
    assert cfg is not None
    assert (cfg.model.micro_batch_size, cfg.model.peft.lora_tuning.alpha, cfg.model.seed) == (4, 8, 7)
    assert cfg.loss.preference_loss == recipe.name


def test_callbacks_are_paths_or_mappings(load: Load) -> None:
    assert load().trainer.callbacks == []
    given = load("trainer.callbacks=[mine.Callback,{_target_: mine.Other, patience: 3}]").trainer.callbacks
    assert given == ["mine.Callback", {"_target_": "mine.Other", "patience": 3}]
    assert mistakes(["trainer.callbacks=mine.Callback"]) == [
        Message("trainer.callbacks", "list", "strings", "mine.Callback")
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.data.data_prefix=rows.jsonl", "rows.jsonl"),
        ("model.data.data_prefix=[0.3,'~/a',0.7,b]", [0.3, f"{os.path.expanduser('~')}/a", 0.7, "b"]),
        (
            "model.data.data_prefix={train: [a], validation: [b], test: []}",
            {"train": ["a"], "validation": ["b"], "test": []},
        ),
    ],
)
def test_forms_of_data_prefix(override: str, expected: object) -> None:
    typed, problems = compose.to_config(compose.load([override, "pretrained_checkpoint.restore_from_path=a"]))
    assert problems == []
    assert typed is not None
    assert typed.model.data.data_prefix == expected
    assert typed.model.data.cache_dir == os.path.expanduser("~/.cache/nemo_kto")


def test_required_keys(recipe: Recipe) -> None:
    cfg, found = compose.to_config(compose.load(source=compose.our_source(recipe)))
    assert cfg is None
    assert [str(mistake) for mistake in found] == [
        Message("pretrained_checkpoint.restore_from_path", "nothing", "folder"),
        Message("model.data.data_prefix", "nothing", "file", "folder", "list"),
    ]


def test_a_configuration_has_its_recipe_and_sections(load: Load, recipe: Recipe) -> None:
    cfg = load(f"trainer.{recipe.name}.max_steps=3", f"model.{recipe.name}.ref_policy_kl_penalty=0.5", recipe=recipe)
    assert cfg.recipe is recipe
    assert cfg.algorithm == recipe.name
    assert isinstance(cfg.loss, recipe.loss_section)
    assert cfg.loss.definition is recipe.losses[recipe.name]
    assert (cfg.loop.max_steps, cfg.loss.ref_policy_kl_penalty) == (3, 0.5)


def test_a_configuration_without_an_algorithm(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  seed: 7\n")
    config = compose.load(source=compose.Source(config_name="mine", config_dir=str(tmp_path)))
    with pytest.raises(UserError) as raised:
        compose.recipe_of(config)
    assert str(raised.value) == Message("gpt_kto", "gpt_dpo")


@pytest.mark.parametrize("averaged", ["true", "false"])
def test_the_sft_loss_averages_like_the_preference_loss_by_default(recipe: Recipe, averaged: str) -> None:
    def loss(*overrides: str) -> DictConfig:
        return composed(overrides, recipe).model[recipe.name]

    section = f"model.{recipe.name}"
    given = f"{section}.preference_average_log_probs={averaged}"
    assert loss(given).sft_average_log_probs is (averaged == "true")
    own = loss(given, f"{section}.sft_average_log_probs={averaged != 'true'}".lower())
    assert (own.preference_average_log_probs, own.sft_average_log_probs) == (averaged == "true", averaged != "true")


def test_a_tilde_in_a_path_is_the_home_folder_and_null_stays_null(load: Load) -> None:
    paths = {
        "pretrained_checkpoint.restore_from_path": "model",
        "exp_manager.explicit_log_dir": "run",
        "model.reference.restore_from_path": "reference",
        "model.peft.restore_from_path": "adapter",
        "export.adapter_path": "out",
    }
    cfg = load(*(f"{key}='~/{name}'" for key, name in paths.items()))
    config = OmegaConf.create(cfg.model_dump())
    home = os.path.expanduser("~")
    assert {key: OmegaConf.select(config, key) for key in paths} == {key: f"{home}/{name}" for key, name in paths.items()}
    assert cfg.export.path == f"{home}/run/hf"
    cfg = load()
    assert (cfg.model.reference.restore_from_path, cfg.model.peft.restore_from_path) == (None, None)


def test_a_user_configuration(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - gpt_{recipe.name}\n  - _self_\nmodel:\n  seed: 7\n")
    source = compose.Source(config_name="mine", config_dir=str(tmp_path))
    config = compose.load(["model.micro_batch_size=2"], source=source)
    assert config.model.seed == 7
    assert compose.recipe_of(config) is recipe
    job = Job(recipe=recipe, source=source, world=None)
    found = job.checker(sweep=False).errors(["trainer.max_steps=x", "hardware=tpu"])
    assert [str(mistake) for mistake in found][:2] == [
        Message("trainer.max_steps", f"trainer.{recipe.name}.max_steps", "-1", "x"),
        Message("cpu", "gpu_node", "tpu"),
    ]


def test_the_configuration_is_found_with_and_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose.importlib.util, "find_spec", lambda name: None)
    assert (Path(compose.config_path()) / "gpt_kto.yaml").is_file()
    monkeypatch.setattr(compose.importlib.util, "find_spec", lambda name: object())
    assert compose.config_path() == "pkg://nemo_kto.conf"


def test_every_job_of_a_sweep_is_checked(good: list[str]) -> None:
    """The first values of each key are fine together, and so is each value with the first ones of the others."""
    swept = ["model.micro_batch_size=1,4", "batch=4,2", "lr=1e-6,-1"]
    wrong = Message("model.global_batch_size", "4", "2", "use")
    assert mistakes([*good, *swept], sweep=True) == [wrong, Message("model.optim.lr", "0", "-1")]
    assert mistakes([*good, "model.micro_batch_size=1,4", "batch=8,4", "lr=1e-6,3e-6"], sweep=True) == []
