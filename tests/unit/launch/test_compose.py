"""Overrides to a typed configuration, and what is said of overrides that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_kto.launch import compose


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "model.micro_batchsize=2",
            "model.micro_batchsize is not a key of the configuration, got model.micro_batchsize=2; "
            "did you mean model.micro_batch_size?",
        ),
        (
            "trainer.max_epochs=3",
            "trainer.max_epochs is not a key of the configuration, got trainer.max_epochs=3; "
            "did you mean trainer.kto.max_epochs?",
        ),
        (
            "optim.name=sgd",
            "optim.name is not a key of the configuration, got optim.name=sgd; did you mean model.optim.name?",
        ),
        ("warmup=3", "warmup is not a key of the configuration, got warmup=3; `nemo-kto kto --help` lists all keys"),
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
        ("trainer.kto.val_check_interval=often", "trainer.kto.val_check_interval must be a number, got 'often'"),
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
    ],
)
def test_a_wrong_override(override: str, text: str) -> None:
    _, problems = compose.check_overrides([override, "model.optim.weight_decay=0.5"])
    assert [str(problem) for problem in problems] == [text]


def test_all_wrong_overrides_are_found_and_the_right_ones_count() -> None:
    config, problems = compose.check_overrides(["model.seed=x", "model.micro_batch_size=4", "foo=1", "hardware=cpu"])
    assert [problem.key for problem in problems] == ["model.seed", "foo"]
    assert config.model.micro_batch_size == 4
    assert config.model.kto.log_prob_forward_micro_batch_size == 8
    assert config.trainer.accelerator == "cpu"
    assert config.model.seed == 1234


def test_each_value_of_a_sweep_is_looked_at() -> None:
    config, problems = compose.check_overrides(["model.optim.lr=1e-6,fast", "model.seed=5,6"], sweep=True)
    assert [str(problem) for problem in problems] == ["model.optim.lr must be a number, got 'fast'"]
    assert config.model.seed == 5


def test_types_are_kept_where_whole_numbers_and_fractions_differ() -> None:
    config = compose.load(["trainer.kto.limit_val_batches=1", "trainer.kto.val_check_interval=0.5", "trainer.precision=32"])
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


def test_what_was_to_be_given_is_empty() -> None:
    typed, problems = compose.to_config(compose.load())
    assert problems == []
    assert typed is not None
    assert typed.pretrained_checkpoint.restore_from_path == ""
    assert typed.model.data.data_prefix == ""
    assert typed.export.path == "results/gpt_kto/hf"


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


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - gpt_kto\n  - _self_\nmodel:\n  seed: 7\n")
    source = compose.Source(config_name="mine", config_dir=str(tmp_path))
    assert compose.load(["model.micro_batch_size=2"], source=source).model.seed == 7


def test_the_configuration_is_found_without_an_installation_and_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose.importlib.util, "find_spec", lambda name: None)
    assert (Path(compose.config_path()) / "gpt_kto.yaml").is_file()
    monkeypatch.setattr(compose.importlib.util, "find_spec", lambda name: object())
    assert compose.config_path() == "pkg://nemo_kto.conf"
