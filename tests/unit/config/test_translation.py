"""Options of TRL, ms-swift, LLaMA-Factory and axolotl as keys of this project."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.algorithms.recipes import DPO, KTO, RECIPES
from nemo_kto.cli import translate as command
from nemo_kto.config.schema import config_type
from nemo_kto.config.translation import read_options, table, translate
from nemo_kto.errors import UserError
from nemo_kto.utils.field_errors import names
from tests.helpers.messages import Message

TUNING, SCHEDULE = "model.peft.lora_tuning", "model.optim.sched"

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: kto
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.2
kto_chosen_weight: 1.33
dataset: mine
template: qwen3_nothink
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
report_to: none
"""
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
rl: ipo
rl_beta: 0.5
datasets:
  - {path: argilla/pairs, type: llama3.ultra, split: train}
adapter: qlora
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 2048
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
evals_per_epoch: 4
load_in_4bit: true
sample_packing: false
wandb_project:
"""
MEGATRON_SWIFT = r"""
NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron rlhf \
    --rlhf_type kto \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI/pairs#20000' \
    --split_dataset_ratio 0.01 \
    --tensor_model_parallel_size 4 \
    --micro_batch_size 1 \
    --global_batch_size $(expr 16 / 4) \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --lr 1e-5 --min_lr 1e-6 \
    --lr_warmup_fraction 0.05 \
    --sequence_parallel true \
    --no_save_optim true
"""


def values_of(text: str, name: str, folder: Path, **options: Any) -> tuple[str, dict[str, object], list[str]]:
    """The algorithm, our keys, and the remarks of a file."""
    (folder / name).write_text(text)
    found = translate(read_options(folder / name), folder=folder, **options)
    assert command.remaining_errors(found) == []
    return found.recipe.name, found.overrides, found.remarks()


def test_a_file_of_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.jsonl"}}))
    algorithm, keys, remarks = values_of(LLAMA_FACTORY, "lf.yaml", tmp_path, ranks=4)
    assert algorithm == "kto"
    assert keys == {
        "pretrained_checkpoint.restore_from_path": "hf:Qwen/Qwen3-4B-Instruct-2507",
        "model.data.data_prefix": str(tmp_path / "data/mine.jsonl"),
        "model.data.splits_string": "90,10",
        "model.data.seq_length": 4096,
        "model.global_batch_size": 32,
        "model.micro_batch_size": 1,
        "trainer.kto.max_epochs": 3,
        "trainer.kto.val_check_interval": 500,
        "trainer.precision": "bf16",
        "model.optim.lr": 5e-6,
        "model.optim.weight_decay": 0.0,
        "model.optim.betas": [0.9, 0.999],
        f"{SCHEDULE}.name": "CosineAnnealing",
        f"{SCHEDULE}.min_lr": 0.0,
        f"{SCHEDULE}.warmup_steps": 0,
        f"{SCHEDULE}.warmup_ratio": 0.1,
        "model.peft.peft_scheme": "lora",
        f"{TUNING}.adapter_dim": 8,
        f"{TUNING}.alpha": 16.0,
        f"{TUNING}.target_modules": ["all-linear"],
        "model.kto.ref_policy_kl_penalty": 0.2,
        "model.kto.desirable_loss_weight": 1.33,
        "exp_manager.create_tensorboard_logger": False,
    }
    assert [line for line in remarks if "no counterpart" in line] == [
        Message("do_train=true", "trains"),
        Message("template=qwen3_nothink", "tokenizer"),
    ]
    assert [line for line in remarks if "model.global_batch_size" in line] == [Message("1", "8", "4")]


def test_a_file_of_axolotl(tmp_path: Path) -> None:
    algorithm, keys, remarks = values_of(AXOLOTL, "axolotl.yml", tmp_path)
    assert algorithm == "dpo"
    expected = {
        "model.dpo.preference_loss": "ipo",
        "model.dpo.preference_average_log_probs": True,
        "model.data.data_prefix": "hf:argilla/pairs",
        "model.data.splits_string": None,
        "model.global_batch_size": 4,
        "model.micro_batch_size": 2,
        "model.optim.lr": 2e-4,
        f"{SCHEDULE}.warmup_ratio": 0.03,
        f"{TUNING}.alpha": 64.0,
        "trainer.dpo.val_check_interval": 0.25,
    }
    assert {key: keys.get(key) for key in expected} == expected
    assert "exp_manager.create_wandb_logger" not in keys
    assert [line for line in remarks if "no counterpart" in line] == [
        Message("optimizer=adamw_8bit", "fp32"),
        Message("load_in_4bit", "quantised"),
    ]


def test_a_script_of_megatron_swift(tmp_path: Path) -> None:
    algorithm, keys, remarks = values_of(MEGATRON_SWIFT, "kto.sh", tmp_path)
    assert algorithm == "kto"
    expected = {
        "trainer.devices": 4,
        "model.global_batch_size": 4,
        "model.micro_batch_size": 1,
        "model.tensor_model_parallel_size": 4,
        "model.sequence_parallel": True,
        "model.data.splits_string": "99,1",
        "model.optim.lr": 1e-5,
        f"{SCHEDULE}.min_lr": 1e-6,
        f"{SCHEDULE}.warmup_ratio": 0.05,
        "model.optim.betas": [0.9, 0.95],
        "model.activations_checkpoint_granularity": "full",
    }
    assert {key: keys.get(key) for key in expected} == expected
    assert "model.peft.peft_scheme" not in keys
    assert [line for line in remarks if "20000" in line or "no_save_optim" in line] == [
        Message("20000", "all rows"),
        Message("no_save_optim", "resumed"),
    ]


TRL = {"model_name_or_path": "m", "dataset_name": "d.jsonl"}
# Options of TRL, and our keys; None for a key that is not set.
CONVERTED: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"max_steps": 100}, {"trainer.dpo.max_steps": 100, "trainer.dpo.max_epochs": 1_000_000}),
    ({"num_train_epochs": 0.5}, {"trainer.dpo.limit_train_batches": 0.5, "trainer.dpo.max_epochs": None}),
    ({"num_train_epochs": 2.5}, {"trainer.dpo.max_epochs": 3}),
    ({"warmup_steps": 0.1}, {f"{SCHEDULE}.warmup_ratio": 0.1, f"{SCHEDULE}.warmup_steps": 0}),
    ({"warmup_steps": 20}, {f"{SCHEDULE}.warmup_ratio": None, f"{SCHEDULE}.warmup_steps": 20}),
    ({"lr_scheduler_type": "constant"}, {f"{SCHEDULE}.name": "constant"}),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}, "learning_rate": "2e-6"},
        {f"{SCHEDULE}.name": "CosineAnnealing", f"{SCHEDULE}.min_lr": 1e-6, "model.optim.lr": 2e-6},
    ),
    ({"adam_beta2": 0.95}, {"model.optim.betas": [0.9, 0.95]}),
    ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, {"model.dpo.sft_loss_weight": 0.5}),
    ({"loss_type": "sigmoid sft"}, {"model.dpo.preference_loss": "dpo", "model.dpo.sft_token_mean": True}),
    ({"rpo_alpha": 2}, {"model.dpo.sft_loss_weight": 2, "model.dpo.sft_token_mean": True}),
    ({"fp16": True}, {"trainer.precision": "bf16"}),
    ({"dtype": "float32"}, {"trainer.precision": "32"}),
    ({"eval_strategy": "epoch"}, {"trainer.dpo.val_check_interval": 1.0}),
    ({"eval_strategy": "steps", "eval_steps": 0.1}, {"trainer.dpo.val_check_interval": pytest.approx(0.3)}),
    ({"save_total_limit": 2}, {"exp_manager.checkpoint_callback_params.save_top_k": 1}),
    ({"ddp_timeout": 90}, {"trainer.timeout_minutes": 2}),
    ({"sync_ref_model": True, "ref_model_sync_steps": 64}, {"model.reference.sync_interval": 64}),
    ({"use_peft": True}, {f"{TUNING}.adapter_dim": 16, f"{TUNING}.target_modules": ["q_proj", "v_proj"]}),
    (
        {"use_peft": True, "lora_target_modules": "all-linear", "layers_to_transform": "0 3"},
        {f"{TUNING}.target_modules": ["all-linear"], f"{TUNING}.layer_selection": [1, 4]},
    ),
    ({"gradient_checkpointing": True}, {"model.activations_checkpoint_granularity": "full"}),
    (
        {"metric_for_best_model": "eval_rewards/margins"},
        {"exp_manager.checkpoint_callback_params.monitor": "val_rewards_margin"},
    ),
    ({"per_device_train_batch_size": 2, "nproc_per_node": 4, "nnodes": 2}, {"model.global_batch_size": 16}),
    ({"max_shard_size": "3GB"}, {"export.max_shard_size_gb": 3}),
    (
        {"dataset_test_split": "test", "dataset_name": "a/b"},
        {"model.data.data_prefix": {"train": "hf:a/b", "validation": "hf:a/b:test"}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), CONVERTED)
def test_values_are_converted(options: dict[str, object], expected: dict[str, object]) -> None:
    found = translate({**TRL, **options}, trainer="trl", recipe=DPO)
    assert {key: found.overrides.get(key) for key in expected} == expected
    assert command.remaining_errors(found) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"learning_rate": "fast"}, Message("learning_rate=fast", "number")),
        ({"num_train_epochs": "inf"}, Message("num_train_epochs=inf", "number")),
        ({"gradient_checkpointing": {"a": 1}}, Message("gradient_checkpointing={a:1}", "not supported")),
        ({"loss_type": "kto"}, Message("loss_type=kto", "dpo", "no such loss")),
        ({"desirable_weight": 2}, Message("desirable_weight=2", "dpo", "no such option")),
        ({"lora_r": 8}, Message("lora_r=8", "LoRA")),
        ({"ld_alpha": 0.5}, Message("ld_alpha=0.5", "position")),
        ({"frobnicate": 1}, Message("frobnicate=1", "no option of TRL")),
        ({"deepspeed": "zero3.json"}, Message("deepspeed=zero3.json", "ZeRO-1")),
    ],
)
def test_options_without_a_counterpart_have_a_reason(options: dict[str, object], reason: Message) -> None:
    found = translate({**TRL, **options}, trainer="trl", recipe=DPO)
    assert [line for line in found.remarks() if "no counterpart" in line] == [reason]


def test_the_algorithm_is_found_or_asked_for() -> None:
    assert translate({**TRL, "desirable_weight": 1.2}).recipe is KTO
    assert translate({**TRL, "loss_type": "sigmoid"}).recipe is DPO
    assert translate({"model": "m", "dataset": "d", "rlhf_type": "orpo"}).overrides["model.dpo.preference_loss"] == "orpo"
    key = "model.dpo.ref_policy_kl_penalty"
    assert translate({"model": "m", "dataset": "d", "rlhf_type": "simpo"}).overrides[key] == 2.0
    assert translate({"base_model": "m", "rl": "simpo"}).overrides[key] == 0.1, "the default of TRL's CPOConfig"
    with pytest.raises(UserError) as error:
        translate(TRL)
    assert str(error.value) == Message("--algorithm", "kto", "dpo", "none")
    with pytest.raises(UserError) as error:
        translate({"stage": "sft", "cutoff_len": 5})
    assert str(error.value) == Message("stage", "kto", "sft")


def test_every_key_in_the_tables_exists() -> None:
    known = set().union(*(names(config_type(recipe)) for recipe in RECIPES.values())) | {"hardware"}
    found = {text.split("=")[0] for values in table()["values"].values() for texts in values.values() for text in texts}
    found |= {key.replace("NAME", name) for key in table()["keys"].values() for name in RECIPES}
    assert len(found) > 50
    assert found - known == set()
    for trainer in table()["trainers"].values():
        assert trainer["title"]
        assert trainer["signs"]


def test_the_printed_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trl.json"
    file.write_text(json.dumps({**TRL, "dataset_name": "it's $a.jsonl", "learning_rate": 5e-7, "frobnicate": 1}))
    command.main([str(file), "--algorithm", "kto", "--ranks", "4"])
    out = capsys.readouterr().out
    script, _, comments = out.partition("\n\n")
    words = shlex.split(script.replace("\\\n", ""), comments=True)
    assert words[:2] == ["nemo-kto", "kto"]
    assert {"model.optim.lr=5e-07", "model.global_batch_size=32", "trainer.devices=4"} <= set(words)
    assert r"model.data.data_prefix='it\'s $a.jsonl'" in words
    assert all(line.startswith("# ") for line in comments.splitlines())
    assert "frobnicate=1" in comments


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: [1"), ("b.txt", "nothing here"), ("c.sh", "trl kto --a 'b")])
def test_files_without_options(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_options(tmp_path / name)
    assert str(error.value).startswith("FILE must ")
