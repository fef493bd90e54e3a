"""Rules of samples: values, the file of prompts, and validations."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import Recipe
from tests.helpers.messages import Message
from tests.unit.conftest import FindErrors

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
