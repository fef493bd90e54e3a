"""Effective configuration of the commands that files of other trainers become, composed and checked as in a run."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config.compose import Source, load, to_config
from nemo_kto.tools.translate.option_files import read_options
from nemo_kto.tools.translate.translation import translate

SOURCES = {name: Source(config_name=recipe.config_name) for name, recipe in RECIPES.items()}
KEYS = {
    "lr": "model.optim.lr", "decay": "model.optim.weight_decay", "betas": "model.optim.betas", "eps": "model.optim.eps",
    "schedule": "model.optim.sched.name", "min_lr": "model.optim.sched.min_lr", "clip": "trainer.NAME.gradient_clip_val",
    "warmup": "model.optim.sched.warmup_steps", "warmup_ratio": "model.optim.sched.warmup_ratio",
    "loss": "model.NAME.preference_loss", "beta": "model.NAME.ref_policy_kl_penalty",
    "mean": "model.NAME.preference_average_log_probs", "weight": "model.NAME.preference_loss_weight",
    "sft": "model.NAME.sft_loss_weight", "sft_mean": "model.NAME.sft_average_log_probs",
    "batch": "model.global_batch_size", "length": "model.data.seq_length", "cut": "model.data.truncation_mode",
    "epochs": "trainer.NAME.max_epochs", "steps": "trainer.NAME.max_steps", "part": "trainer.NAME.limit_train_batches",
    "split": "model.data.splits_string", "precision": "trainer.precision", "fields": "model.data.fields",
    "scheme": "model.peft.peft_scheme", "quantize": "model.quantize",
}  # fmt: skip
TUNING = {
    "rank": "adapter_dim", "alpha": "alpha", "dropout": "adapter_dropout", "targets": "target_modules", "rslora": "rslora",
}  # fmt: skip
PAIRS = {
    "smoothing": "label_smoothing", "exo": "exo_label_smoothing", "gamma": "simpo_gamma", "token_mean": "sft_token_mean",
    "orpo_sft": "orpo_sft_weight", "only_answers": "sft_completion_only",
}  # fmt: skip


def lora(rank: int, alpha: int, dropout: float, *targets: str, **others: Any) -> dict[str, Any]:
    return {"scheme": "lora", "rank": rank, "alpha": alpha, "dropout": dropout, "targets": list(targets), **others}


ALL, QV = "all-linear", ("q_proj", "v_proj")
COMMON: dict[str, Any] = {
    "eps": 1e-8, "clip": 1.0, "beta": 0.1, "min_lr": 0.0, "warmup": 0, "warmup_ratio": None, "loss": "dpo", "mean": False,
    "weight": 1.0, "sft": 0.0, "sft_mean": False, "epochs": 3, "steps": -1, "part": 1.0, "split": None, "precision": "auto",
    "scheme": "none", "quantize": None, "fields": None, "rslora": False, "smoothing": None, "exo": None, "gamma": None,
    "token_mean": False,
    "orpo_sft": None, "only_answers": True, "betas": [0.9, 0.999], "decay": 0.0, "cut": "keep_start",
}  # fmt: skip
# How a file of a trainer begins, and the effective configuration of its defaults.
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "trl": (
        "accelerate launch dpo.py --model_name_or_path m --dataset_name d.jsonl",
        {"lr": 1e-6, "schedule": "LinearAnnealing", "batch": 8, "length": 1024},
    ),
    "swift": (
        "swift rlhf --model m --dataset d.jsonl",
        {"lr": 1e-4, "schedule": "CosineAnnealing", "batch": 16, "length": None, "cut": "keep_end", "decay": 0.1}
        | {"betas": [0.9, 0.95], **lora(8, 32, 0.05, ALL)},
    ),
}  # fmt: skip
# Trainer, algorithm, the rest of a file, and how its effective configuration differs from that of the defaults.
TRL_ORPO = {"loss": "orpo", "sft": 1.0, "token_mean": True, "orpo_sft": 0.0, "only_answers": False}
FILES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("trl", "dpo", "", {}),
    ("trl", "dpo", "--use_peft", lora(16, 32, 0.05, *QV)),
    ("trl", "dpo", "--learning_rate 5.0e-7 --max_steps 1000 --per_device_train_batch_size 2 --gradient_accumulation_steps 8",
     {"lr": 5e-7, "steps": 1000, "epochs": 1_000_000, "batch": 16}),
    ("trl", "dpo", "--use_peft --lora_r 32 --lora_alpha 16 --learning_rate 5e-6 --num_train_epochs 1",
     {"lr": 5e-6, "epochs": 1, **lora(32, 16, 0.05, *QV)}),
    ("trl", "kto", "--per_device_train_batch_size 4 --lr_scheduler_type cosine --warmup_steps 0.1 --bf16",
     {"loss": "kto", "batch": 4, "schedule": "CosineAnnealing", "warmup_ratio": 0.1, "precision": "bf16"}),
    ("trl", "kto", "--use_peft --load_in_4bit --lora_target_modules=all-linear --lora_alpha 16 --max_length 2048",
     {"loss": "kto", "length": 2048, "quantize": "nf4", **lora(16, 16, 0.05, ALL)}),
    ("trl", "dpo", "--loss_type sigmoid sft --loss_weights 0.8 0.5", {"weight": 0.8, "sft": 0.5, "token_mean": True}),
    ("trl", "dpo", "--loss_type '[\"ipo\"]' --beta 0.01", {"loss": "ipo", "beta": 0.01, "mean": True, "sft_mean": True}),
    ("trl", "dpo", "--loss_type exo_pair --label_smoothing 0.01", {"loss": "exo_pair", "exo": 0.01}),
    ("trl", "kto", "--loss_type apo_zero_unpaired --dtype float32", {"loss": "apo_zero_unpaired", "precision": "bf16"}),
    ("trl", "dpo", "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'",
     {"min_lr": 1e-7, "schedule": "CosineAnnealing"}),
    ("trl", "dpo", "--loss_type simpo --beta 2", {"loss": "simpo", "beta": 2, "gamma": 0.5, "sft": 1.0, "token_mean": True}),

    ("swift", "dpo", "--rlhf_type dpo", {}),
    ("swift", "dpo", "--rlhf_type dpo --train_type full", {"lr": 1e-5, "scheme": "none"}),
    ("swift", "kto", "--rlhf_type kto --warmup_ratio 0.05 --max_length 2048 --gradient_accumulation_steps 16 --lora_rank 16 "
     "--num_train_epochs 1", {"loss": "kto", "warmup_ratio": 0.05, "length": 2048, "epochs": 1, "rank": 16}),
    ("swift", "dpo", "--rlhf_type simpo", {"loss": "simpo", "beta": 2.0, "gamma": 1.0, "sft": 1.0, "token_mean": True}),
    ("swift", "dpo", "--rlhf_type simpo --cpo_alpha 0 --beta 1", {"loss": "simpo", "beta": 1.0, "gamma": 1.0}),
    ("swift", "dpo", "--rlhf_type orpo --learning_rate 8e-6", {"lr": 8e-6, **TRL_ORPO}),
    ("swift", "dpo", "--rlhf_type dpo --rpo_alpha 0.1 --split_dataset_ratio 0.01",
     {"sft": 0.1, "token_mean": True, "split": "99,1"}),
    ("swift", "dpo", "--rlhf_type dpo --max_length 8192 --truncation_strategy right --use_rslora true --lora_alpha 8",
     {"length": 8192, "cut": "keep_start", "rslora": True, "alpha": 8}),
    ("swift", "dpo", "--rlhf_type dpo --nproc_per_node 8 --per_device_train_batch_size 4 --torch_dtype bfloat16",
     {"batch": 32, "precision": "bf16"}),
    ("swift", "dpo", "--rlhf_type dpo --weight_decay 0.2 --lr_scheduler_type linear --max_grad_norm 0.5",
     {"decay": 0.2, "schedule": "LinearAnnealing", "clip": 0.5}),
    ("swift", "kto", "--rlhf_type kto --tuner_type full --tensor_model_parallel_size 4 --global_batch_size 32 "
     "--finetune true --no_save_optim true --min_lr 1e-6",
     {"loss": "kto", "lr": 1e-5, "min_lr": 1e-6, "batch": 32, "epochs": 1, "scheme": "none"}),
    ("swift", "dpo", "--rlhf_type dpo --tuner_type lora --global_batch_size 16 --micro_batch_size 2 "
     "--attention_backend flash --save_safetensors true --lr_warmup_fraction 0.1 --recompute_granularity full "
     "--recompute_method uniform --recompute_num_layers 1", {"warmup_ratio": 0.1, "epochs": 1}),

]  # fmt: skip


def effective(file: Path, algorithm: str) -> dict[str, Any]:
    """The values of the composed command, of adapters only if they are trained, and of pairs only for DPO."""
    given = read_options(file)
    found = translate(given.values, trainer=given.trainer, method=given.method, recipe=RECIPES[algorithm])
    config = load(found.words(), source=SOURCES[algorithm])
    assert to_config(config, recipe=found.recipe)[1] == []
    values: Any = OmegaConf.to_container(config, resolve=True)
    keys = KEYS | ({name: f"model.dpo.{key}" for name, key in PAIRS.items()} if algorithm == "dpo" else {})
    if values["model"]["peft"]["peft_scheme"] == "lora":
        keys |= {name: f"model.peft.lora_tuning.{key}" for name, key in TUNING.items()}
    paths = {name: key.replace("NAME", algorithm).split(".") for name, key in keys.items()}
    return {name: functools.reduce(operator.getitem, path, values) for name, path in paths.items()}


@pytest.mark.parametrize(("trainer", "algorithm", "text", "differing"), FILES)
def test_the_effective_configuration_is_that_of_the_file(
    trainer: str, algorithm: str, text: str, differing: dict[str, Any], tmp_path: Path
) -> None:
    start, defaults = TRAINERS[trainer]
    start = start.replace("swift rlhf", "megatron rlhf") if "--global_batch_size" in text else start
    file = tmp_path / ("run.yaml" if start.startswith("{") else "run.sh")
    file.write_text(f"{start} {text}")
    found = effective(file, algorithm)
    expected = {**COMMON, **defaults, **differing}
    assert {name: value for name, value in found.items() if value != expected[name]} == {}


def test_each_trainer_has_twelve_files() -> None:
    assert {name: sum(trainer == name for trainer, *_ in FILES) for name in TRAINERS} == dict.fromkeys(TRAINERS, 12)
