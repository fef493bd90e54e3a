"""Overrides to a typed configuration, and what is said of overrides that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from nemo_kto.launch import compose
from nemo_kto.launch.schema import DPO, KTO, Algorithm
from tests.unit.launch.conftest import composed, of


def source_of(algorithm: Algorithm) -> compose.Source:
    return compose.Source(algorithm.config_name)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            "model.seed=7",
            "model.data.data_prefix={train: [a], validation: [0.5, b], test: []}",
            "model.optim.betas=[0,0.5]",
            "trainer.precision=32",
            "model.optim.lr=nan",
            "model.reference.restore_from_path=null",
            "exp_manager.explicit_log_dir=''",
            "model.peft.lora_tuning.layer_selection=[1,30]",
            "trainer.devices=all",
        ],
    ],
    ids=["none", "many"],
)
def test_the_short_way_of_the_tables_gives_what_composing_gives(algorithm: Algorithm, overrides: list[str]) -> None:
    slow, fast = compose.load(overrides, source=source_of(algorithm)), composed(overrides, algorithm)
    assert compose.algorithm_of(fast) is compose.algorithm_of(slow) is algorithm
    assert OmegaConf.to_yaml(fast) == OmegaConf.to_yaml(slow)  # nan is not equal to itself
    assert str(compose.to_config(fast)) == str(compose.to_config(slow))


def test_the_short_way_keeps_the_types() -> None:
    with pytest.raises(HydraException, match=r"Error merging override model\.seed=x"):
        composed(["model.seed=x"], KTO)
    with pytest.raises(HydraException, match=r"Could not override 'model\.seeds'"):
        composed(["model.seeds=3"], KTO)
    assert composed([], KTO).model.seed == 1234


# An override of any algorithm and what is said of it.
WRONG = [
    (
        "model.micro_batchsize=2",
        "model.micro_batchsize is not a key of the configuration, got model.micro_batchsize=2; "
        "did you mean model.micro_batch_size?",
    ),
    (
        "trainer.max_epochs=3",
        "trainer.max_epochs is not a key of the configuration, got trainer.max_epochs=3; "
        "did you mean trainer.ALGORITHM.max_epochs?",
    ),
    (
        "optim.name=sgd",
        "optim.name is not a key of the configuration, got optim.name=sgd; did you mean model.optim.name?",
    ),
    ("warmup=3", "warmup is not a key of the configuration, got warmup=3; `nemo-kto ALGORITHM --help` lists all keys"),
    (
        "+model.seeds=3",  # a plus must not smuggle in a key that nobody reads
        "model.seeds is not a key of the configuration, got +model.seeds=3; did you mean model.seed?",
    ),
    (
        "++model.optim.sched.warmup=3",
        "model.optim.sched.warmup is not a key of the configuration, got ++model.optim.sched.warmup=3; "
        "did you mean model.optim.sched.warmup_steps?",
    ),
    ("model.micro_batch_size=two", "model.micro_batch_size must be a whole number, got 'two'"),
    ("model.micro_batch_size='2x'", "model.micro_batch_size must be a whole number, got '2x'"),
    ("model.micro_batch_size=2.5", "model.micro_batch_size must be a whole number, got 2.5"),
    ("model.micro_batch_size=true", "model.micro_batch_size must be a whole number, got true"),
    ("model.seed=null", "model.seed must be a whole number, got null"),
    ("model.optim.lr=fast", "model.optim.lr must be a number, got 'fast'"),
    ("model.optim.betas=[0.9,x]", "model.optim.betas must be a list of numbers, got [0.9, 'x']"),
    ("model.sequence_parallel=maybe", "model.sequence_parallel must be true or false, got 'maybe'"),
    (
        "trainer.ALGORITHM.val_check_interval=often",
        "trainer.ALGORITHM.val_check_interval must be a number, got 'often'",
    ),
    ("model.ALGORITHM.sft_loss_weight=some", "model.ALGORITHM.sft_loss_weight must be a number, got 'some'"),
    ("model.reference.sync_interval=1.5", "model.reference.sync_interval must be a whole number, got 1.5"),
    ("model.reference.restore_from_path=[a]", "model.reference.restore_from_path must be a text or null, got ['a']"),
    ("model.peft.peft_scheme=null", "model.peft.peft_scheme must be a text, got null"),
    (
        "model.peft.lora_tuning.target_modules=q_proj",
        "model.peft.lora_tuning.target_modules must be a list of texts, got 'q_proj'",
    ),
    (
        "model.peft.lora_tuning.layer_selection=[1,x]",
        "model.peft.lora_tuning.layer_selection must be a list of whole numbers or null, got [1, 'x']",
    ),
    ("trainer.devices=[1]", "trainer.devices must be a whole number or a text, got [1]"),
    (
        "model.optim.sched=cosine",
        "model.optim.sched must be a section with the keys name, warmup_steps, min_lr, got 'cosine'",
    ),
    ("hardware=tpu", "hardware must be one of cpu, gpu_node, got tpu"),
    ("~model.seed", "model.seed cannot be deleted, got ~model.seed; set it to another value"),
    ("model.seed", "model.seed must be written KEY=VALUE, got model.seed"),
    (
        "model.seed=1,2",
        "model.seed must have one value, got model.seed=1,2; write [a,b] for a list, or add --multirun for a sweep",
    ),
    (
        "model.data.data_prefix=a b=c",
        "model.data.data_prefix has a value that cannot be read, got model.data.data_prefix=a b=c; "
        "put it in quotes: 'model.data.data_prefix=\"...\"'",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("override", "text"), WRONG)
def test_a_wrong_override(algorithm: Algorithm, override: str, text: str) -> None:
    override, text = of(algorithm, [override, text])
    _, problems = compose.check_overrides([override, "model.optim.weight_decay=0.5"], source=source_of(algorithm))
    assert [str(problem) for problem in problems] == [text]


def test_all_wrong_overrides_at_once() -> None:
    """Each for itself, as above, takes four times as long."""
    overrides, texts = of(KTO, [override for override, _ in WRONG]), of(KTO, [text for _, text in WRONG])
    config, problems = compose.check_overrides([*overrides, "model.optim.weight_decay=0.5"], source=source_of(KTO))
    assert [str(problem) for problem in problems] == texts
    assert config.model.optim.weight_decay == 0.5


def test_what_is_said_of_wrong_overrides_names_the_algorithm(other: Algorithm) -> None:
    """Those of the table that bear its name, in the override or in the text."""
    named = [entry for entry in WRONG if "ALGORITHM" in "".join(entry)]
    assert len(named) >= 4
    overrides = of(other, [override for override, _ in named])
    _, problems = compose.check_overrides([*overrides, "model.optim.weight_decay=0.5"], source=source_of(other))
    assert [str(problem) for problem in problems] == of(other, [text for _, text in named])


@pytest.mark.parametrize(
    ("algorithm", "override", "text"),
    [
        (
            KTO,
            "model.dpo.preference_loss=ipo",
            "model.dpo.preference_loss is not a key of the configuration, got model.dpo.preference_loss=ipo; "
            "did you mean model.kto.preference_loss?",
        ),
        (
            KTO,
            "model.data.default_chosen_reward=2",
            "model.data.default_chosen_reward is not a key of the configuration, got model.data.default_chosen_reward=2; "
            "`nemo-kto kto --help` lists all keys",
        ),
        (
            DPO,
            "trainer.kto.max_steps=3",
            "trainer.kto.max_steps is not a key of the configuration, got trainer.kto.max_steps=3; "
            "did you mean trainer.dpo.max_steps?",
        ),
        (
            DPO,
            "model.kto.auto_balance=true",
            "model.kto.auto_balance is not a key of the configuration, got model.kto.auto_balance=true; "
            "`nemo-kto dpo --help` lists all keys",
        ),
        (DPO, "model.dpo.label_smoothing=x", "model.dpo.label_smoothing must be a number, got 'x'"),
        (DPO, "model.data.default_chosen_reward=null", "model.data.default_chosen_reward must be a number, got null"),
    ],
)
def test_a_key_of_the_other_algorithm_and_those_of_one_alone(algorithm: Algorithm, override: str, text: str) -> None:
    _, problems = compose.check_overrides([override], source=source_of(algorithm))
    assert [str(problem) for problem in problems] == [text]


def test_all_wrong_overrides_are_found_and_the_right_ones_count(algorithm: Algorithm) -> None:
    overrides = ["model.seed=x", "model.micro_batch_size=4", "foo=1", "hardware=cpu"]
    config, problems = compose.check_overrides(overrides, source=source_of(algorithm))
    assert [problem.key for problem in problems] == ["model.seed", "foo"]
    assert config.model.micro_batch_size == 4
    assert config.model[algorithm.name].log_prob_forward_micro_batch_size == 8
    assert config.trainer.accelerator == "cpu"
    assert config.model.seed == 1234


def test_each_value_of_a_sweep_is_looked_at() -> None:
    config, problems = compose.check_overrides(["model.optim.lr=1e-6,fast", "model.seed=5,6"], sweep=True)
    assert [str(problem) for problem in problems] == ["model.optim.lr must be a number, got 'fast'"]
    assert config.model.seed == 5


def test_types_are_kept_where_whole_numbers_and_fractions_differ() -> None:
    config = composed(["trainer.kto.limit_val_batches=1", "trainer.kto.val_check_interval=0.5", "trainer.precision=32"], KTO)
    assert (type(config.trainer.kto.limit_val_batches), config.trainer.kto.limit_val_batches) == (int, 1)
    assert (type(config.trainer.kto.limit_train_batches), config.trainer.kto.limit_train_batches) == (float, 1.0)
    assert config.trainer.kto.val_check_interval == 0.5
    assert config.trainer.precision == "32"


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
def test_the_forms_of_data_prefix(override: str, expected: object) -> None:
    config, problems = compose.check_overrides([override])
    assert problems == []
    typed, problems = compose.to_config(config)
    assert problems == []
    assert typed is not None
    assert typed.model.data.data_prefix == expected
    assert typed.model.data.cache_dir == os.path.expanduser("~/.cache/nemo_kto")


def test_what_was_to_be_given_is_empty(algorithm: Algorithm) -> None:
    typed, problems = compose.to_config(compose.load(source=source_of(algorithm)))
    assert problems == []
    assert typed is not None
    assert typed.pretrained_checkpoint.restore_from_path == ""
    assert typed.model.data.data_prefix == ""
    assert typed.export.path == f"results/gpt_{algorithm.name}/hf"
    assert typed.export.adapter_path == f"results/gpt_{algorithm.name}/adapter"


def test_a_configuration_knows_its_algorithm_and_the_sections_that_bear_its_name(algorithm: Algorithm) -> None:
    config = compose.load(
        [f"trainer.{algorithm.name}.max_steps=3", f"model.{algorithm.name}.ref_policy_kl_penalty=0.5"],
        source=source_of(algorithm),
    )
    assert compose.algorithm_of(config) is algorithm
    typed, _ = compose.to_config(config)
    assert typed is not None
    assert type(typed) is algorithm.config_type
    assert typed.algorithm is algorithm
    assert (typed.loop.max_steps, typed.loss.ref_policy_kl_penalty) == (3, 0.5)


def test_kto_is_what_is_loaded_unless_another_is_named() -> None:
    assert compose.algorithm_of(compose.load()) is KTO


def test_a_configuration_of_no_algorithm_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  seed: 7\n")
    config = compose.load(source=compose.Source(config_name="mine", config_dir=str(tmp_path)))
    with pytest.raises(HydraException) as raised:
        compose.algorithm_of(config)
    assert str(raised.value) == "its defaults must begin with gpt_kto or gpt_dpo, which bring the types of the keys"


@pytest.mark.parametrize("averaged", ["true", "false"])
def test_the_sft_loss_averages_where_the_preference_loss_does_unless_told(algorithm: Algorithm, averaged: str) -> None:
    def loss(*overrides: str) -> DictConfig:
        return composed(overrides, algorithm).model[algorithm.name]

    section = f"model.{algorithm.name}"
    given = f"{section}.preference_average_log_probs={averaged}"
    assert loss(given).sft_average_log_probs is (averaged == "true")
    own = loss(given, f"{section}.sft_average_log_probs={averaged != 'true'}".lower())
    assert (own.preference_average_log_probs, own.sft_average_log_probs) == (averaged == "true", averaged != "true")


def test_adapters_are_scaled_by_one_unless_told() -> None:
    tuning = composed(["model.peft.lora_tuning.adapter_dim=8"], KTO).model.peft.lora_tuning
    assert (tuning.adapter_dim, tuning.alpha) == (8, 8.0)
    both = ["model.peft.lora_tuning.adapter_dim=8", "model.peft.lora_tuning.alpha=16"]
    tuning = composed(both, KTO).model.peft.lora_tuning
    assert (tuning.adapter_dim, tuning.alpha) == (8, 16.0)


def test_a_tilde_in_a_path_is_the_home_folder_and_null_stays_null() -> None:
    paths = {
        "pretrained_checkpoint.restore_from_path": "model",
        "exp_manager.explicit_log_dir": "run",
        "model.reference.restore_from_path": "reference",
        "model.peft.restore_from_path": "adapter",
        "export.adapter_path": "out",
    }
    typed, problems = compose.to_config(compose.load([f"{key}='~/{name}'" for key, name in paths.items()]))
    assert problems == []
    config = OmegaConf.structured(typed)
    home = os.path.expanduser("~")
    assert {key: OmegaConf.select(config, key) for key in paths} == {key: f"{home}/{name}" for key, name in paths.items()}
    assert config.export.path == f"{home}/run/hf"
    typed, _ = compose.to_config(compose.load())
    assert typed is not None
    assert (typed.model.reference.restore_from_path, typed.model.peft.restore_from_path) == (None, None)


def test_an_interpolation_that_leads_nowhere() -> None:
    config, problems = compose.check_overrides(["model.optim.eps=${nowhere}", "model.seed=${model.optim.name}"])
    assert problems == []
    typed, problems = compose.to_config(config)
    assert typed is None
    assert [problem.key for problem in problems] == ["model.seed", "model.optim.eps"]
    assert str(problems[1]) == "model.optim.eps does not resolve: Interpolation key 'nowhere' not found (model.optim.eps)"


def test_resolvers() -> None:
    compose.register()
    config = OmegaConf.create({"product": "${multiply:2,3,4}", "quotient": "${int_div:17,5}"})
    assert (config.product, config.quotient) == (24, 3)


def test_a_configuration_of_ones_own(algorithm: Algorithm, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - gpt_{algorithm.name}\n  - _self_\nmodel:\n  seed: 7\n")
    source = compose.Source(config_name="mine", config_dir=str(tmp_path))
    config = compose.load(["model.micro_batch_size=2"], source=source)
    assert config.model.seed == 7
    assert compose.algorithm_of(config) is algorithm
    _, problems = compose.check_overrides(["trainer.max_steps=x"], source=source)
    assert [str(problem) for problem in problems] == [
        "trainer.max_steps is not a key of the configuration, got trainer.max_steps=x; "
        f"did you mean trainer.{algorithm.name}.max_steps?"
    ]


def test_the_configuration_is_found_without_an_installation_and_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose.importlib.util, "find_spec", lambda name: None)
    assert (Path(compose.config_path()) / "gpt_kto.yaml").is_file()
    monkeypatch.setattr(compose.importlib.util, "find_spec", lambda name: object())
    assert compose.config_path() == "pkg://nemo_kto.conf"
