"""What must stay in a resumed run and what may change: the table, and the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config.keys import all_keys
from nemo_kto.config.resume_policy import MAY_CHANGE, MUST_STAY, Rule, as_markdown, rule_of
from nemo_kto.run.facts import differences, facts_of_earlier
from tests.helpers.messages import Message

KEYS = [(name, key.name) for name, recipe in RECIPES.items() for key in all_keys(recipe)]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md"


def matching(rules: tuple[Rule, ...], name: str, key: str) -> bool:
    found = rule_of(key, name=name)
    return found is not None and found[0] in rules


def test_every_key_has_a_resume_policy() -> None:
    assert len(KEYS) > 150
    assert not [key for name, key in KEYS if rule_of(key, name=name) is None], "say whether it may change, in identity.py"


@pytest.mark.parametrize("pattern", [pattern for rule in (*MUST_STAY, *MAY_CHANGE) for pattern in rule.keys])
def test_every_resume_policy_belongs_to_a_key(pattern: str) -> None:
    rules = tuple(rule for rule in (*MUST_STAY, *MAY_CHANGE) if pattern in rule.keys)
    assert len(rules) == 1
    assert [key for name, key in KEYS if matching(rules, name, key)]


@pytest.mark.parametrize(
    ("key", "stays"),
    [
        ("model.kto.ref_policy_kl_penalty", True),
        ("model.kto.desirable_loss_weight", True),
        ("model.kto.log_prob_forward_micro_batch_size", False),
        ("model.peft.lora_tuning.alpha", True),
        ("model.peft.lora_tuning.adapter_dropout", False),
        ("model.optim.lr", False),
        ("model.optim.use_distributed_optimizer", True),
        ("model.tensor_model_parallel_size", False),
        ("model.seed", True),
        ("trainer.kto.max_steps", False),
    ],
)
def test_an_exact_key_has_priority_over_a_pattern(key: str, stays: bool) -> None:
    found = rule_of(key, name="kto")
    assert found is not None
    assert found[1] is stays


def test_the_resume_page_has_the_table() -> None:
    assert as_markdown() in PAGE.read_text(encoding="utf-8"), "python -m nemo_kto.config.resume_policy prints it"


def content(hashed: str, place: str) -> dict[str, str]:
    return {"sha256": hashed, "from": place}


FACTS: dict[str, Any] = {
    "algorithm": "kto",
    "pretrained_checkpoint.restore_from_path": content("a", "/model"),
    "model.reference.restore_from_path": None,
    "model.reference.sync_interval": 0,
    "model.kto.ref_policy_kl_penalty": 0.1,
    "model.data.data_prefix": content("b", "77 rows"),
    "order of the rows": content("c", "that of numpy 2.0"),
    "trainer.kto.limit_train_batches": 6,
    "model.global_batch_size": 16,
    "model.seed": 1234,
    "trainer.precision": "32",
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"model.kto.ref_policy_kl_penalty": 0.2},
            [Message("model.kto.ref_policy_kl_penalty", "0.1", "0.2")],
        ),
        ({"pretrained_checkpoint.restore_from_path": content("a", "/moved")}, []),
        (
            {"pretrained_checkpoint.restore_from_path": content("z", "/other")},
            [Message("pretrained_checkpoint.restore_from_path", "others", "/other", "/model")],
        ),
        (
            {"pretrained_checkpoint.restore_from_path": content("z", "/model")},
            [Message("pretrained_checkpoint.restore_from_path", "others", "/model")],
        ),
        (
            {"model.reference.restore_from_path": content("z", "/other")},
            [Message("model.reference.restore_from_path", "others", "/other", "none")],
        ),
        (
            {
                "model.data.data_prefix": content("z", "78 rows"),
                "order of the rows": content("z", "that of numpy 3.0"),
                "trainer.kto.limit_train_batches": 7,
            },
            [Message("model.data.data_prefix", "splits_string", "others", "78", "77")],
        ),
        (
            {"model.seed": 7, "order of the rows": content("z", "that of numpy 3.0")},
            [Message("model.seed", "1234", "7")],
        ),
        (
            {"order of the rows": content("z", "that of numpy 3.0")},
            [Message("model.seed", "others", "3.0", "2.0")],
        ),
        (
            {"trainer.kto.limit_train_batches": 2},
            [Message("trainer.kto.limit_train_batches", "6", "2")],
        ),
        (
            {"trainer.precision": "bf16", "model.seed": 7},
            [
                Message("model.seed", "1234", "7"),
                Message("trainer.precision", "32", "bf16"),
            ],
        ),
    ],
)
def test_every_difference_is_reported(change: dict[str, Any], told: list[str]) -> None:
    assert differences(FACTS, {**FACTS, **change}) == told


def test_options_of_only_one_of_two_losses_are_not_compared() -> None:
    before, now = ({"model.dpo.preference_loss": loss} for loss in ("dpo", "simpo"))
    told = differences({**before, "model.dpo.label_smoothing": 0.0}, {**now, "model.dpo.simpo_gamma": 0.5})
    assert told == [Message("model.dpo.preference_loss", "dpo", "simpo")]


EARLIER: dict[str, Any] = {
    "trainer": {"step": 4, "consumed_samples": 64, "steps_per_epoch": 6},
    "dtype": "float32",
    "distributed_optimizer": True,
    "moving_reference": False,
}


def test_a_checkpoint_of_an_earlier_version() -> None:
    now = {**FACTS, "model.optim.use_distributed_optimizer": True, "model.peft.peft_scheme": "none"}
    assert differences(facts_of_earlier(EARLIER, now), now) == []
    adapters = {"rank": 3, "alpha": 6, "dropout": 0.1, "target_modules": ["attention_qkv"], "layers": None}
    then = EARLIER | {"dtype": "bfloat16", "distributed_optimizer": False, "moving_reference": True}
    then |= {"adapters": {"base_model": "/model", "settings": adapters}}
    now |= {"model.global_batch_size": 8, "trainer.kto.limit_train_batches": 12, "model.peft.lora_tuning.alpha": 3.0}
    now |= {"model.peft.lora_tuning.target_modules": ["q_proj", "k_proj", "v_proj"]}
    assert differences(facts_of_earlier(then, now), now) == [
        Message("model.reference.sync_interval", "0"),
        Message("model.global_batch_size", "16", "8"),
        Message("trainer.precision", "bf16", "32"),
        Message("model.optim.use_distributed_optimizer", "false", "true"),
        Message("model.peft.peft_scheme", "lora", "none"),
        Message("model.peft.lora_tuning.alpha", "6.0", "3.0"),
    ]
