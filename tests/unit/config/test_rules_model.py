"""Rules of the model: sizes, recomputation, optimizer, losses, reference and adapters.

ALGORITHM stands for the name of each algorithm, ADAPTER and MODEL for folders that exist.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file

from nemo_kto.algorithms.recipes import KTO, Recipe
from nemo_kto.config.schema import ScheduleConfig
from nemo_kto.losses import kto as kto_losses
from nemo_kto.losses import preference as pair_losses
from nemo_kto.models.engine.optimizer import SCHEDULES
from tests.helpers.messages import Message
from tests.helpers.tiny_models import write_stub_model
from tests.unit.conftest import FindErrors, Text, of

TUNING = "model.peft.lora_tuning"
INSTANCES = "model.optim.num_distributed_optimizer_instances"
SCHEDULE = "model.optim.sched"
LORA = "model.peft.peft_scheme=lora"
MODULES = (
    "attention_qkv, attention_dense, mlp_fc1, mlp_fc2, attention, mlp, all, all-linear, q_proj, k_proj, v_proj, o_proj, "
    "gate_proj, up_proj, down_proj or embed_tokens"
)


def with_folders(texts: Sequence[Text], folder: Path) -> list[Text]:
    return [text.replace("ADAPTER", f"{folder}/adapter").replace("MODEL", f"{folder}/model") for text in texts]


# Valid overrides.
RIGHT = [
    [
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_method=block",
        "model.activations_checkpoint_num_layers=2",
    ],
    ["model.optim.sched.warmup_steps=20", "trainer.ALGORITHM.max_steps=2"],  # shortened where the run begins
    ["model.optim.sched.warmup_ratio=0.1", "model.optim.sched.warmup_steps=0"],
    [f"{SCHEDULE}.name=WSD", f"{SCHEDULE}.wsd_decay_steps=9", f"{SCHEDULE}.wsd_decay_style=minus_sqrt"],
    [f"{SCHEDULE}.name=CosineWithRestarts", f"{SCHEDULE}.num_cycles=3"],
    ["model.optim.sched.min_lr=0", "model.optim.betas=[0,0]"],
    ["model.ALGORITHM.preference_loss_weight=0", "model.ALGORITHM.sft_loss_weight=0.5"],
    ["model.reference.mode=cached", "model.reference.restore_from_path=MODEL"],
    ["model.reference.mode=adapter", LORA],
    ["model.reference.mode=adapter", "model.reference.sync_interval=5", LORA, "model.peft.restore_from_path=ADAPTER"],
    ["model.reference.mode=cached", LORA],
    ["model.reference.restore_from_path=MODEL", LORA],
    ["model.reference.restore_from_path=ADAPTER", LORA],
    ["model.reference.restore_from_path=ADAPTER"],
    ["model.reference.restore_from_path=MODEL", "model.peft.restore_from_path=ADAPTER", LORA],
    [LORA, f"{TUNING}.target_modules=[all,q_proj]", f"{TUNING}.layer_selection=[1,30]", f"{TUNING}.alpha=0.5"],
]


@pytest.mark.parametrize("overrides", RIGHT, ids=lambda value: str(value)[:50])
def test_valid_settings_pass(find_errors: FindErrors, tmp_path: Path, overrides: list[str]) -> None:
    assert find_errors(*with_folders(of(KTO, overrides), tmp_path)) == []


def test_valid_settings_pass_with_other_algorithms(find_errors: FindErrors, tmp_path: Path, other: Recipe) -> None:
    wrong = {
        str(overrides): given
        for overrides in RIGHT
        if (given := find_errors(*with_folders(of(other, overrides), tmp_path), recipe=other))
    }
    assert wrong == {}


# The least that a trainer.json holds.
INFO = {"trainer": {"step": 3}, "metrics": {}, "dtype": "float32", "layout": {}, "files": {}}


def checkpoint_of_adapters(folder: Path, base: Path) -> Path:
    write_stub_model(folder / "hf")
    adapters = {"base_model": str(base), "settings": {"rank": 1, "alpha": 1.0}}
    (folder / "trainer.json").write_text(json.dumps({**INFO, "adapters": adapters}))
    return folder


def test_adapters_of_the_policy_that_would_be_ignored_are_refused(
    find_errors: FindErrors, recipe: Recipe, tmp_path: Path
) -> None:
    key = "pretrained_checkpoint.restore_from_path"
    trained = checkpoint_of_adapters(tmp_path / "step", tmp_path / "model")
    named, adapter = f"{key}={trained}", f"model.peft.restore_from_path={tmp_path}/adapter"
    assert find_errors(named, LORA, recipe=recipe) == []
    assert find_errors(named, LORA, "model.reference.mode=adapter", "model.reference.sync_interval=5", recipe=recipe) == []
    assert find_errors(named, recipe=recipe) == [
        Message(f"{key}", "adapters", f"{trained}", "model.peft.peft_scheme=lora", "first", "FOLDER")
    ]
    assert find_errors(named, LORA, adapter, recipe=recipe) == [
        Message("model.peft.restore_from_path", "null", f"{key}", "adapters", f"{tmp_path}/adapter", "set")
    ]


def test_adapters_without_their_base_model_are_refused(find_errors: FindErrors, recipe: Recipe, tmp_path: Path) -> None:
    lost = checkpoint_of_adapters(tmp_path / "step", tmp_path / "gone")
    for key in ("pretrained_checkpoint.restore_from_path", "model.reference.restore_from_path"):
        assert find_errors(f"{key}={lost}", LORA, recipe=recipe) == [
            Message(f"{key}", "adapters", "trainer.json", f"{lost}", f"{tmp_path}/gone", "correct")
        ]


def test_a_reference_of_another_shape_is_refused(find_errors: FindErrors, recipe: Recipe, tmp_path: Path) -> None:
    for name, size in (("model", 64), ("other", 32)):
        write_stub_model(tmp_path / name)
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    trained = checkpoint_of_adapters(tmp_path / "step", tmp_path / "other")
    for reference in (tmp_path / "other", trained):
        assert find_errors(f"model.reference.restore_from_path={reference}", recipe=recipe) == [
            Message(
                "model.reference.restore_from_path",
                f"{tmp_path}/model",
                f"{tmp_path}/other",
                "hidden_size",
                "32",
                "64",
                "train",
            )
        ]
    assert find_errors(f"model.reference.restore_from_path={tmp_path}/model", recipe=recipe) == []


@pytest.mark.parametrize(("changes", "why"), [({"layer_selection": "[1]"}, "layers"), ({"dora": "true"}, "DoRA")])
def test_adapters_of_an_embedding(find_errors: FindErrors, changes: dict[str, str], why: str) -> None:
    given = [LORA, *(f"{TUNING}.{key}={value}" for key, value in changes.items())]
    targets = f"{TUNING}.target_modules"
    assert find_errors(*given, f"{targets}=[embed_tokens,o_proj]") == [Message(f"{targets}", "embed_tokens", why, "o_proj")]
    assert find_errors(*given, f"{targets}=[o_proj]") == []


def test_a_tied_embedding_is_not_adapted(find_errors: FindErrors, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert find_errors(LORA, f"{TUNING}.target_modules=[embed_tokens]") == [
        Message(f"{TUNING}.target_modules", "embed_tokens", "peft")
    ]
    weights = {"model.embed_tokens.weight": torch.zeros(1), "lm_head.weight": torch.ones(1)}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    assert find_errors(LORA, f"{TUNING}.target_modules=[embed_tokens]") == [], "it is not tied, whatever config.json says"


def test_choices_of_the_schema_equal_the_implemented_names() -> None:
    assert set(get_args(ScheduleConfig.model_fields["name"].annotation)) == set(SCHEDULES)
    assert set(kto_losses.LOSSES) == {"kto", "apo_zero_unpaired", "bco"}
    difference = "dpo ipo hinge robust exo_pair discopop rpo_sq rpo_bwd_kl rpo_fwd_kl simpo orpo sigmoid_norm"
    anchored = "nca_pair bco_pair sppo_hard apo_zero apo_down cpo cpo_simpo alphapo"
    assert set(pair_losses.LOSSES) == {*difference.split(), *anchored.split(), "aot", "aot_unpaired"}
