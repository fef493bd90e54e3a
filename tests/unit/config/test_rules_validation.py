"""Rules of validation sets and of samples: names, files, the monitored metrics, values, prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import Recipe
from tests.helpers.messages import Message, assert_names
from tests.unit.config.test_rules import MODE, MONITOR, OFFERED, mode_of
from tests.unit.conftest import FindErrors

STOPPED_BY = "exp_manager.early_stopping_callback_params.monitor"


@pytest.fixture
def sets(tmp_path: Path) -> str:
    """The override for two sets."""
    return override(tmp_path, "helpful", "harmless")


def override(folder: Path, *names: str) -> str:
    files = ", ".join(f"{name}: {folder}/rows.jsonl" for name in names)
    return f"model.data.data_prefix={{train: {folder}/rows.jsonl, validation: {{{files}}}}}"


@pytest.mark.parametrize("monitor", ["val_loss", "val_helpfull_loss", "val_helpful", "helpful_loss", "val_harmless_los"])
def test_a_metric_of_an_unknown_set_lists_the_available_ones(
    find_errors: FindErrors, recipe: Recipe, sets: str, monitor: str
) -> None:
    """The default too: which set ranks the checkpoints is for the user to say."""
    assert find_errors(sets, *([] if monitor == "val_loss" else [f"{MONITOR}={monitor}"]), recipe=recipe) == [
        Message(
            MONITOR, "val_helpful_", "val_harmless_", "train_", f"{OFFERED[recipe.name]}", f"{monitor}", "val_helpful_loss"
        )
    ]


def test_each_metric_of_each_set_can_be_monitored(find_errors: FindErrors, recipe: Recipe, sets: str) -> None:
    for name in ("val_helpful", "val_harmless", "train"):
        for metric in OFFERED[recipe.name].split(", "):
            assert find_errors(sets, f"{MONITOR}={name}_{metric}", f"{MODE}={mode_of(metric)}", recipe=recipe) == []
    assert find_errors(sets, f"{MONITOR}=val_harmless_auc", f"{MODE}=max") == []


NAMES = "model.data.data_prefix"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["preference"], [Message(NAMES, "preference", "val_preference_loss", "rename")]),
        (["loss", "kl"], [Message(NAMES, "loss", "val_loss", "rename"), Message(NAMES, "kl", "val_kl", "rename")]),
        (["invalid"], [Message(NAMES, "invalid", "val_invalid_rows", "rename")]),
        (["a", "a_preference"], [Message(NAMES, "a", "a_preference", "val_a_preference_loss", "rename")]),
        (["a_preference", "a"], [Message(NAMES, "a", "a_preference", "val_a_preference_loss", "rename")]),
        (["a", "a_loss"], [Message(NAMES, "a", "a_loss", "val_a_loss", "rename")]),
        (["auc"], [Message(NAMES, "auc", "val_auc", "rename")]),
        (["math", "math_hard", "chosen", "val", "train", "A", "2024"], []),
    ],
)
def test_set_names_that_collide_with_metrics(
    find_errors: FindErrors, tmp_path: Path, names: list[str], expected: list[str]
) -> None:
    assert find_errors(override(tmp_path, *names), f"{MONITOR}=train_loss") == expected


def test_invalid_names_and_files_are_reported_together(find_errors: FindErrors, tmp_path: Path) -> None:
    files = f"{{help ful: {tmp_path}/rows.jsonl, a/b: /nowhere/a, preference: [0.5, /nowhere/b]}}"
    found = find_errors(
        f"model.data.data_prefix={{train: {tmp_path}/rows.jsonl, validation: {files}}}", f"{MONITOR}=val_loss"
    )
    assert found[:-1] == [
        Message("model.data.data_prefix", "files", "/nowhere/a", "path"),
        Message("model.data.data_prefix", "files", "/nowhere/b", "path"),
        Message("model.data.data_prefix", "read", "validation", "help", "a/b", "rename"),
        Message(NAMES, "preference", "val_preference_loss", "rename"),
    ]
    assert_names(found[-1], MONITOR, "val_help ful_")


KEY = "exp_manager.samples"
ON = f"{KEY}.count=2"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two prompts, the second of which is messages."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    return file


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ([f"{KEY}.count=-1"], [Message(f"{KEY}.count", "0", "-1")]),
        (
            [f"{KEY}={{max_new_tokens: 0, temperature: -1, top_p: 0, top_k: -1}}"],
            [
                Message(f"{KEY}.max_new_tokens", "1", "0"),
                Message(f"{KEY}.temperature", "0", "-1"),
                Message(f"{KEY}.top_p", "0", "1"),
                Message(f"{KEY}.top_k", "0", "-1"),
            ],
        ),
        ([ON, f"{KEY}.top_p=0.9"], [Message(f"{KEY}.top_p", "1.0", "temperature=0.0", "0.9", f"{KEY}.temperature=1.0")]),
        ([ON, f"{KEY}.top_k=9"], [Message(f"{KEY}.top_k", "must be 0", "temperature=0.0", "9", f"{KEY}.temperature=1.0")]),
        ([ON, "model.data.seq_length=64"], [Message(f"{KEY}.max_new_tokens", "model.data.seq_length=64", "64", "lower")]),
        (
            [ON, "trainer.kto.val_check_interval=0", "model.data.splits_string=null"],
            [
                Message("trainer.kto.val_check_interval", "0", f"{KEY}.count=2", f"{KEY}.count=0"),
                Message("model.data.splits_string", "validation", f"{KEY}.count=2", "null", "90,10", f"{KEY}.count=0"),
            ],
        ),
        ([f"{KEY}.prompts=absent.txt"], [Message(f"{KEY}.prompts", "absent.txt", "cannot be read", "correct")]),
        ([ON, f"{KEY}.temperature=0.7", f"{KEY}.top_p=0.9", f"{KEY}.top_k=9"], []),
        ([f"{KEY}.top_p=0.9"], []),  # not used
    ],
    ids=lambda value: str(value)[:50],
)
def test_values(find_errors: FindErrors, overrides: list[str], texts: list[Message]) -> None:
    assert find_errors(*overrides) == texts


def test_prompts_can_be_read(find_errors: FindErrors, recipe: Recipe, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_errors(f"{KEY}.prompts={file}", recipe=recipe) == [
        Message(f"{KEY}.prompts", "plain strings", "chat template", f"{file}", "chat_template.jinja")
    ]
    monkeypatch.setattr("nemo_kto.config.rules.training_rules.has_chat_template", lambda folder: True)
    assert find_errors(f"{KEY}.prompts={file}", recipe=recipe) == []
    file.write_text('{"prompt": 3}\n')
    assert find_errors(f"{KEY}.prompts={file}", recipe=recipe) == [Message(f"{KEY}.prompts", f"{file}:1", '"prompt"', "3")]
