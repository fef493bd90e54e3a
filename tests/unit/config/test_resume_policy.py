"""Keys that may or may not change in a resumed run."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config.schema import config_type
from nemo_kto.run.resume import differences
from nemo_kto.utils.fields import MayChange, MustStay, names
from tests.helpers.messages import Message


def resume(name: str, key: str) -> MustStay | MayChange | None:
    return names(config_type(RECIPES[name]))[key].resume


def test_every_key_has_a_resume_policy(recipe: Recipe) -> None:
    keys = {key: field.resume for key, field in names(config_type(recipe)).items() if field.section is None}
    assert len(keys) > 70
    assert not [key for key, marker in keys.items() if marker is None], "annotate it with MustStay or MayChange in schema.py"


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
def test_the_marker_of_a_key_has_priority_over_that_of_its_section(key: str, stays: bool) -> None:
    assert isinstance(resume("kto", key), MustStay if stays else MayChange)


def test_verbatim_values() -> None:
    fields = {key: field for name in RECIPES for key, field in names(config_type(RECIPES[name])).items()}
    verbatim = {key for key, field in fields.items() if isinstance(field.resume, MustStay) and field.resume.verbatim}
    assert verbatim >= {
        "algorithm",
        *(f"model.data.{key}" for key in ("eod_mask_loss", "reset_attention_mask", "seq_length", "truncation_mode")),
        *("model.global_batch_size", "model.moe_aux_loss_coeff", "model.optim.name"),
        *("model.optim.use_distributed_optimizer", "model.peft.peft_scheme", "model.reference.sync_interval"),
        *("model.seed", "trainer.precision"),
    }


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
    ("change", "expected"),
    [
        ({"model.kto.ref_policy_kl_penalty": 0.2}, [Message("model.kto.ref_policy_kl_penalty", "0.1", "0.2")]),
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
        ({"model.seed": 7, "order of the rows": content("z", "that of numpy 3.0")}, [Message("model.seed", "1234", "7")]),
        ({"order of the rows": content("z", "that of numpy 3.0")}, [Message("model.seed", "others", "3.0", "2.0")]),
        ({"trainer.kto.limit_train_batches": 2}, [Message("trainer.kto.limit_train_batches", "6", "2")]),
        (
            {"trainer.precision": "bf16", "model.seed": 7},
            [Message("model.seed", "1234", "7"), Message("trainer.precision", "32", "bf16")],
        ),
    ],
)
def test_every_difference_is_reported(change: dict[str, Any], expected: list[str]) -> None:
    assert differences(FACTS, {**FACTS, **change}) == expected


def test_mixtures_are_compared() -> None:
    key = "model.dpo.preference_losses"
    before = {key: {"dpo": 0.8, "bco_pair": 0.2}}
    assert differences(before, {key: {"bco_pair": 0.2, "dpo": 0.8}}) == []
    assert differences(before, {key: {"dpo": 1.0}}) == [Message(key, "0.8", "1.0")]
    assert differences(before, {key: None}) == [Message(key, "0.8", "null")]


def test_options_of_only_one_of_two_losses_are_not_compared() -> None:
    before, now = ({"model.dpo.preference_loss": loss} for loss in ("dpo", "simpo"))
    expected = differences({**before, "model.dpo.label_smoothing": 0.0}, {**now, "model.dpo.simpo_gamma": 0.5})
    assert expected == [Message("model.dpo.preference_loss", "dpo", "simpo")]
