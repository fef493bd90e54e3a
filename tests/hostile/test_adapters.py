"""Hostile adapters and checkpoints: each is refused before the start, with its error and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.messages import Message
from tests.hostile.folders import (
    Break,
    assert_harmless,
    both,
    content,
    cut,
    fields,
    launcher_says,
    linked,
    ranks_say,
    removed,
    shapes,
)  # fmt: skip

LORA = "model.peft.peft_scheme=lora"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapter(**changes: object) -> Break:
    return fields(ADAPTER_CONFIG, **changes)


ADAPTERS: dict[str, tuple[Break, Message]] = {
    "no adapter": (removed(ADAPTER_CONFIG), Message("folder", "PEFT", "adapter_config.json")),
    "weights are a link that leads out": (
        both(
            lambda folder: (folder / ADAPTER_WEIGHTS).rename(folder.parent / "weights"),
            linked(ADAPTER_WEIGHTS, "../weights", new=True),
        ),
        Message(ADAPTER_WEIGHTS, "file", "folder", "link"),
    ),
    "configuration is a link that leads out": (
        both(
            lambda folder: (folder / ADAPTER_CONFIG).rename(folder.parent / "configuration"),
            linked(ADAPTER_CONFIG, "../configuration", new=True),
        ),
        Message("/configuration", "download"),
    ),
    "configuration is garbage": (content(ADAPTER_CONFIG, b"{]"), Message("adapter_config.json", "JSON")),
    "weights are cut": (cut(ADAPTER_WEIGHTS, 0.9), Message("download")),
    "weights are int8": (shapes({}, "I8", ADAPTER_WEIGHTS), Message("I8", "F64", "F32", "F16", "BF16")),
    "prefix tuning": (adapter(peft_type="PREFIX_TUNING"), Message("peft_type", "LORA", "PREFIX_TUNING")),
    "DoRA without magnitudes": (
        adapter(use_dora=True),
        Message("use_dora", "lora_magnitude_vector", "True"),
    ),
    "modules_to_save": (adapter(modules_to_save=["lm_head"]), Message("modules_to_save", "['lm_head']")),
    "a bias": (adapter(bias="all"), Message("none", "all")),
    "another start": (adapter(init_lora_weights="pissa"), Message("init_lora_weights", "pissa")),
    "a negative rank": (adapter(r=-2), Message("integer", "1", "-2")),
    "another rank than the tensors": (adapter(r=3), Message("3", "shape", "2", "8", A)),
    "alpha of 400 digits": (adapter(lora_alpha=10**400), Message("lora_alpha", "0", "1000000")),
    "a field that controls the terminal": (adapter(**{"\x1b[2J": "x" * 100_000}), Message(r"\x1b[2J", "set")),
    "alpha is NaN": (adapter(lora_alpha=float("nan")), Message("lora_alpha", "0", "1000000", "nan")),
    "dropout of one": (adapter(lora_dropout=1.0), Message("lora_dropout", "0", "1", "1.0")),
    "ranks by pattern": (adapter(rank_pattern={"q_proj": 8}), Message("rank_pattern", "q_proj", "8")),
    "a tensor of the output layer": (
        shapes({"base_model.model.lm_head.lora_A.weight": (2, 8)}, file=ADAPTER_WEIGHTS),
        Message("1", "base_model")),
    "a tensor of one dimension": (shapes({A: (2,)}, file=ADAPTER_WEIGHTS), Message("2", "shape", "[2]", A)),
    "layers that the model does not have": (
        shapes({A.replace("layers.0", "layers.7"): (2, 8), A.replace("layers.0", "layers.7").replace("q_", "v_"): (2, 8)},
               file=ADAPTER_WEIGHTS), Message("1", "2")),
}  # fmt: skip


def test_valid_folders_give_no_error(here: Path) -> None:
    given = [LORA, f"model.peft.restore_from_path='{here / 'adapter'}'"]
    assert launcher_says(here / "model", here / "rows.jsonl", *given) == []
    assert ranks_say(here / "model", here / "adapter") is None


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_checked_before_the_start(here: Path, case: str) -> None:
    breaks, expected = ADAPTERS[case]
    breaks(here / "adapter")
    errors = launcher_says(here / "model", here / "rows.jsonl", LORA, f"model.peft.restore_from_path='{here / 'adapter'}'")
    assert errors == [expected]
    assert errors[0].startswith("model.peft.restore_from_path ")
    assert_harmless(errors[0])


def info(**changes: Any) -> str:
    """A trainer.json of step 3 with the least that it holds, and changes."""
    return json.dumps({"trainer": {"step": 3}, "metrics": {}, "dtype": "float32", "layout": {}, "files": {}, **changes})


CHECKPOINTS: dict[str, tuple[str, Message]] = {
    "no JSON": ("{", Message("trainer.json", "JSON")),
    "another dtype": ('{"files": {}, "dtype": "int8"}', Message("trainer.json", "dtype", "bfloat16", "int8")),
    "files that are a list": ('{"files": [], "dtype": "float32"}', Message("trainer.json", "files", "[]")),
    "a file that is cut": (info(files={"hf/config.json": {"size": 3, "sha256": ""}}), Message("hf/config.json")),
    "adapters of unknown settings": (
        info(adapters={"base_model": "x", "settings": {"depth": 3}}), Message("trainer.json", "adapters")),
    "a base model that is gone": (
        info(adapters={"base_model": "/nowhere/base", "settings": {"rank": 1, "alpha": 1}}),
        Message("/nowhere/base", "trainer.json")),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_is_checked_before_the_start(here: Path, case: str) -> None:
    text, expected = CHECKPOINTS[case]
    checkpoint = here / "step_000003"
    checkpoint.mkdir()
    (here / "model").rename(checkpoint / "hf")
    (checkpoint / "trainer.json").write_text(text)
    (errors,) = launcher_says(checkpoint, here / "rows.jsonl")
    assert errors.startswith("pretrained_checkpoint.restore_from_path ")
    assert errors == expected


def test_target_modules_that_the_model_lacks(here: Path) -> None:
    assert launcher_says(here / "model", here / "rows.jsonl", LORA, "model.peft.lora_tuning.layer_selection=[1,3]") == [
        Message("model.peft.lora_tuning.layer_selection", "1", "2", f"{here / 'model'}", "layer", "3", "correct")
    ]
