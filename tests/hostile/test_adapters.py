"""Hostile adapters and checkpoints of ours: each is refused before anything starts, with what is wrong and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.folders import (
    GONE,
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


ADAPTERS: dict[str, tuple[Break, str]] = {
    "no adapter": (removed(ADAPTER_CONFIG), "must be a folder in PEFT format (with adapter_config.json)"),
    "no weights": (
        removed(ADAPTER_WEIGHTS),
        "must be an adapter in PEFT's format, but adapter_model.safetensors is not there",
    ),
    "weights are a link that leads out": (
        both(
            lambda folder: (folder / ADAPTER_WEIGHTS).rename(folder.parent / "weights"),
            linked(ADAPTER_WEIGHTS, "../weights", anew=True),
        ),
        f"{ADAPTER_WEIGHTS} must be a file of its folder, got a link to ",
    ),
    "configuration is a link that leads out": (
        both(
            lambda folder: (folder / ADAPTER_CONFIG).rename(folder.parent / "configuration"),
            linked(ADAPTER_CONFIG, "../configuration", anew=True),
        ),
        "/configuration, which is outside; copy it there, or download the model again",
    ),
    "configuration is garbage": (content(ADAPTER_CONFIG, b"{]"), "adapter_config.json must be JSON"),
    "configuration is a list": (content(ADAPTER_CONFIG, b"[]"), "adapter_config.json must be a JSON object, got list"),
    "configuration is empty": (content(ADAPTER_CONFIG, b"{}"), "peft_type must be LORA, got None"),
    "weights are cut": (cut(ADAPTER_WEIGHTS, 0.9), "it was cut short or changed; download or write it again"),
    "weights are garbage": (
        content(ADAPTER_WEIGHTS, b"x" * 99),
        "adapter_model.safetensors must be a whole safetensors file",
    ),
    "weights are int8": (shapes({}, "I8", ADAPTER_WEIGHTS), "is I8 and not F64, F32, F16 or BF16"),
    "no tensors": (
        content(ADAPTER_WEIGHTS, (2).to_bytes(8, "little") + b"{}"),
        "at least one layer must be adapted, got no",
    ),
    "prefix tuning": (adapter(peft_type="PREFIX_TUNING"), "peft_type must be LORA, got PREFIX_TUNING"),
    "IA3": (adapter(peft_type="IA3"), "peft_type must be LORA, got IA3"),
    "a type that is a list": (adapter(peft_type=["LORA"]), "peft_type must be LORA, got ['LORA']"),
    "DoRA without magnitudes": (
        adapter(use_dora=True),
        "use_dora must be False without lora_magnitude_vector among the tensors, got True",
    ),
    "modules_to_save": (adapter(modules_to_save=["lm_head"]), "modules_to_save must not be set, got ['lm_head']"),
    "a bias": (adapter(bias="all"), "bias must be none, got all"),
    "another start": (adapter(init_lora_weights="pissa"), "init_lora_weights must leave the base model as it is, got pissa"),
    "a start that is a list": (
        adapter(init_lora_weights=[]),
        "init_lora_weights must leave the base model as it is, got []",
    ),
    "rank zero": (adapter(r=0), "r must be an integer of at least 1, got 0"),
    "a negative rank": (adapter(r=-2), "r must be an integer of at least 1, got -2"),
    "a rank that is a string": (adapter(r="2"), "r must be an integer of at least 1, got '2'"),
    "a rank that is a fraction": (adapter(r=2.5), "r must be an integer of at least 1, got 2.5"),
    "no rank": (adapter(r=GONE), "r must be an integer of at least 1, got None"),
    "another rank than the tensors": (adapter(r=3), "the rank of the configuration, r = 3, got shape [2, 8] of " + A),
    "alpha zero": (adapter(lora_alpha=0), "lora_alpha must be above 0 and at most 1000000, got 0"),
    "alpha is huge": (adapter(lora_alpha=1e300), "lora_alpha must be above 0 and at most 1000000, got 1e+300"),
    "alpha of 400 digits": (adapter(lora_alpha=10**400), "lora_alpha must be above 0 and at most 1000000, got 1000000"),
    "a field that controls the terminal": (adapter(**{"\x1b[2J": "x" * 100_000}), r"\x1b[2J must not be set, got xxx"),
    "alpha is NaN": (adapter(lora_alpha=float("nan")), "lora_alpha must be above 0 and at most 1000000, got nan"),
    "alpha is null": (adapter(lora_alpha=None), "lora_alpha must be above 0 and at most 1000000, got None"),
    "dropout of one": (adapter(lora_dropout=1.0), "lora_dropout must be from 0 to below 1, got 1.0"),
    "ranks by pattern": (adapter(rank_pattern={"q_proj": 8}), "rank_pattern must not be set, got {'q_proj': 8}"),
    "targets that are a number": (adapter(target_modules=7), "target_modules must be a list of names, got 7"),
    "a tensor of the output layer": (
        shapes({"base_model.model.lm_head.lora_A.weight": (2, 8)}, file=ADAPTER_WEIGHTS),
        "got 1 others, such as base_model"),
    "a tensor of one dimension": (shapes({A: (2,)}, file=ADAPTER_WEIGHTS), f"r = 2, got shape [2] of {A}"),
    "layers that the model does not have": (
        shapes({A.replace("layers.0", "layers.7"): (2, 8), A.replace("layers.0", "layers.7").replace("q_", "v_"): (2, 8)},
               file=ADAPTER_WEIGHTS), "must adapt layers from 1 to 2, which "),
}  # fmt: skip


def test_nothing_is_said_of_what_is_whole(here: Path) -> None:
    given = [LORA, f"model.peft.restore_from_path='{here / 'adapter'}'"]
    assert launcher_says(here / "model", here / "rows.jsonl", *given) == []
    assert ranks_say(here / "model", here / "adapter") is None


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_looked_at_before_anything_starts(here: Path, case: str) -> None:
    breaks, expected = ADAPTERS[case]
    breaks(here / "adapter")
    said = launcher_says(here / "model", here / "rows.jsonl", LORA, f"model.peft.restore_from_path='{here / 'adapter'}'")
    assert len(said) == 1
    assert said[0].startswith("model.peft.restore_from_path ")
    assert expected in said[0]
    assert_harmless(said[0])


CHECKPOINTS: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "trainer.json must be JSON"),
    "a list": ("[]", "trainer.json must be a JSON object, got list; take another checkpoint of the run"),
    "nothing in it": ("{}", "trainer.json must have files, dtype and adapters as this program writes them, got something"),
    "another dtype": ('{"files": {}, "dtype": "int8"}', "trainer.json must have files, dtype and adapters"),
    "files that are a list": ('{"files": [], "dtype": "float32"}', "trainer.json must have files, dtype and adapters"),
    "a file that is not there": (
        '{"files": {"state/x": 3}, "dtype": "float32"}', "but state/x is not there; take another checkpoint"),
    "a file that is cut": ('{"files": {"hf/config.json": 3}, "dtype": "float32"}', "but hf/config.json has "),
    "adapters that are a list": ('{"files": {}, "dtype": "float32", "adapters": []}', "trainer.json must have files"),
    "adapters of nothing": (
        '{"files": {}, "dtype": "float32", "adapters": {}}', "must name the base model and the settings of its adapters"),
    "adapters of unknown settings": (
        '{"files": {}, "dtype": "float32", "adapters": {"base_model": "x", "settings": {"depth": 3}}}',
        "must name the base model and the settings of its adapters"),
    "a base model that is gone": (
        '{"files": {}, "dtype": "float32", "adapters": {"base_model": "/nowhere/base", "settings": '
        '{"rank": 1, "alpha": 1}}}',
        "with /nowhere/base, which is no model on this machine; put it there, or correct trainer.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_of_ours_is_looked_at_too(here: Path, case: str) -> None:
    text, expected = CHECKPOINTS[case]
    checkpoint = here / "step_000003"
    checkpoint.mkdir()
    (here / "model").rename(checkpoint / "hf")
    (checkpoint / "trainer.json").write_text(text)
    (said,) = launcher_says(checkpoint, here / "rows.jsonl")
    assert said.startswith("pretrained_checkpoint.restore_from_path ")
    assert expected in said


def test_layers_to_adapt_that_the_model_does_not_have(here: Path) -> None:
    assert launcher_says(here / "model", here / "rows.jsonl", LORA, "model.peft.lora_tuning.layer_selection=[1,3]") == [
        f"model.peft.lora_tuning.layer_selection must adapt layers from 1 to 2, which {here / 'model'} has, got layer 3; "
        "correct it"
    ]
