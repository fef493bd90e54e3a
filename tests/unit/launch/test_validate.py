"""Each rule beyond the types: the exact text where it is broken, and silence where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.launch import validate
from nemo_kto.launch.schema import KTOConfig
from nemo_kto.launch.validate import problems
from nemo_kto.losses.kto import LOSSES, kto_metrics
from nemo_kto.models.optimizer import SCHEDULES

Load = Callable[..., KTOConfig]

# Overrides, number of ranks, what is said.
BROKEN = [
    (["trainer.num_nodes=0"], 1, ["trainer.num_nodes must be at least 1, got 0"]),
    (["trainer.devices=0"], 1, ["trainer.devices must be at least 1, got 0; use auto for one rank a GPU"]),
    (["trainer.devices=all"], 1, ["trainer.devices must be a whole number or auto, got 'all'"]),
    (
        ["trainer.devices=2", "trainer.num_nodes=2"],
        3,
        [
            "trainer.devices must fit the ranks that were started (trainer.num_nodes * trainer.devices = 2 * 2 = 4), got 3; "
            "start 4 ranks or set trainer.num_nodes and trainer.devices to what you started",
            "model.global_batch_size must be divisible by micro_batch_size * data-parallel ranks = 1 * 3 = 3, got 64; "
            "use 63 or 66",
        ],
    ),
    (["trainer.accelerator=tpu"], 1, ["trainer.accelerator must be auto, cpu or gpu, got tpu"]),
    (["trainer.precision=fp16"], 1, ["trainer.precision must be bf16 or 32, got fp16"]),
    (["trainer.timeout_minutes=0"], 1, ["trainer.timeout_minutes must be at least 1, got 0"]),
    (
        ["trainer.max_time=03:45:00"],
        1,
        [
            "trainer.max_time must be written DD:HH:MM:SS (days:hours:minutes:seconds), got '03:45:00'; "
            "e.g. trainer.max_time=00:03:45:00"
        ],
    ),
    (["trainer.kto.max_epochs=0"], 1, ["trainer.kto.max_epochs must be at least 1, got 0"]),
    (["trainer.kto.max_steps=0"], 1, ["trainer.kto.max_steps must be at least 1, got 0; use -1 for no limit"]),
    (
        ["trainer.kto.gradient_clip_val=-1"],
        1,
        ["trainer.kto.gradient_clip_val must be at least 0, got -1.0; 0 switches clipping off"],
    ),
    (
        ["trainer.kto.val_check_interval=-1"],
        1,
        ["trainer.kto.val_check_interval must be a whole number of at least 0, or a fraction from 0.0 to 1.0, got -1"],
    ),
    (
        ["trainer.kto.save_interval=1.5"],
        1,
        ["trainer.kto.save_interval must be a whole number of at least 0, or a fraction from 0.0 to 1.0, got 1.5"],
    ),
    (
        ["trainer.kto.limit_val_batches=nan"],
        1,
        ["trainer.kto.limit_val_batches must be a whole number of at least 0, or a fraction from 0.0 to 1.0, got nan"],
    ),
    (
        ["trainer.kto.limit_train_batches=0.0"],
        1,
        ["trainer.kto.limit_train_batches must leave something to train on, got 0; use 1.0 for all"],
    ),
    (
        ["exp_manager.checkpoint_callback_params.mode=best"],
        1,
        ["exp_manager.checkpoint_callback_params.mode must be min or max, got best"],
    ),
    (
        ["exp_manager.checkpoint_callback_params.save_top_k=-2"],
        1,
        [
            "exp_manager.checkpoint_callback_params.save_top_k must be at least -1, got -2; "
            "-1 keeps all checkpoints, 0 the last alone"
        ],
    ),
    (
        ["exp_manager.checkpoint_callback_params.monitor=val_los"],
        1,
        [
            "exp_manager.checkpoint_callback_params.monitor must be val_ or train_ and one of loss, kl, rewards_margin, "
            "rewards_chosen_mean, rewards_rejected_mean, rewards_all_mean, rewards_all_std, logps_chosen_mean, "
            "logps_rejected_mean, got val_los; e.g. val_loss"
        ],
    ),
    (
        ["exp_manager.checkpoint_callback_params.monitor=val_kl", "model.kto.preference_loss=apo_zero_unpaired"],
        1,
        [
            "exp_manager.checkpoint_callback_params.monitor must not be kl, which apo_zero_unpaired does not "
            "have, got val_kl; "
            "e.g. val_loss"
        ],
    ),
    (["exp_manager.explicit_log_dir=''"], 1, ["exp_manager.explicit_log_dir must name a folder, got nothing"]),
    (
        ["pretrained_checkpoint.restore_from_path=/nowhere/model"],
        1,
        [
            "pretrained_checkpoint.restore_from_path must be a Hugging Face folder (with config.json) or one of our "
            "checkpoints (with trainer.json), got /nowhere/model; download it or correct the path"
        ],
    ),
    (
        ["pretrained_checkpoint.restore_from_path=''"],
        1,
        [
            "pretrained_checkpoint.restore_from_path must be given, got nothing; name the folder of a Hugging Face model",
        ],
    ),
    (
        ["model.data.data_prefix={train: [/nowhere/a, /nowhere/b], validation: [0.5, /nowhere/c]}"],
        1,
        [
            "model.data.data_prefix must name files and folders that exist, got /nowhere/a; correct the path",
            "model.data.data_prefix must name files and folders that exist, got /nowhere/b; correct the path",
            "model.data.data_prefix must name files and folders that exist, got /nowhere/c; correct the path",
        ],
    ),
    (
        ["model.data.data_prefix=null"],
        1,
        ["model.data.data_prefix must be given, got nothing; name a jsonl file, a folder or a list of them"],
    ),
    (
        ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"],
        6,
        [
            "model.tensor_model_parallel_size * pipeline_model_parallel_size = 2 * 2 = 4 must divide the number "
            "of ranks, got 6; "
            "use a multiple of 4 ranks (trainer.devices) or smaller sizes"
        ],
    ),
    (
        ["model.tensor_model_parallel_size=0", "model.pipeline_model_parallel_size=-1"],
        1,
        [
            "model.tensor_model_parallel_size must be at least 1, got 0",
            "model.pipeline_model_parallel_size must be at least 1, got -1",
        ],
    ),
    (
        ["model.global_batch_size=10", "model.micro_batch_size=2", "model.tensor_model_parallel_size=2"],
        8,
        [
            "model.global_batch_size must be divisible by micro_batch_size * data-parallel ranks = 2 * 4 = 8, got 10; "
            "use 8 or 16"
        ],
    ),
    (
        ["model.global_batch_size=3", "model.micro_batch_size=4"],
        1,
        [
            "model.global_batch_size must be divisible by micro_batch_size * data-parallel ranks = 4 * 1 = 4, got 3; use 4",
        ],
    ),
    (
        ["model.global_batch_size=1"],
        1,
        [
            "model.global_batch_size must be at least 2: the reference point pairs each row with the answer of "
            "another, got 1; "
            "use a larger batch"
        ],
    ),
    (["model.micro_batch_size=0"], 1, ["model.micro_batch_size must be at least 1, got 0"]),
    (["model.logprob_chunk_size=0"], 1, ["model.logprob_chunk_size must be at least 1, got 0"]),
    (
        ["model.sequence_parallel=true"],
        1,
        [
            "model.sequence_parallel needs model.tensor_model_parallel_size above 1, got 1; "
            "raise it or set model.sequence_parallel=false"
        ],
    ),
    (
        ["model.virtual_pipeline_model_parallel_size=2"],
        1,
        [
            "model.virtual_pipeline_model_parallel_size must be null, got 2: virtual pipelines are not supported "
            "in this version",
        ],
    ),
    (
        ["model.context_parallel_size=2"],
        1,
        ["model.context_parallel_size must be 1, got 2: context parallelism is not supported in this version"],
    ),
    (
        ["model.expert_model_parallel_size=2"],
        1,
        ["model.expert_model_parallel_size must be 1, got 2: expert parallelism is not supported in this version"],
    ),
    (
        ["model.fp8=hybrid"],
        1,
        ["model.fp8 must be null, got hybrid: fp8 needs Transformer Engine and is not supported in this version"],
    ),
    (
        ["model.peft.peft_scheme=lora"],
        1,
        ["model.peft.peft_scheme must be none, got lora: adapters are not supported in this version"],
    ),
    (
        ["model.activations_checkpoint_granularity=some"],
        1,
        ["model.activations_checkpoint_granularity must be null, selective or full, got some"],
    ),
    (
        ["model.activations_checkpoint_granularity=full", "model.activations_checkpoint_method=uniform"],
        1,
        [
            "model.activations_checkpoint_num_layers must be given with "
            "model.activations_checkpoint_granularity=full, got null; "
            "e.g. model.activations_checkpoint_num_layers=1"
        ],
    ),
    (
        ["model.activations_checkpoint_method=block"],
        1,
        [
            "model.activations_checkpoint_method must be null unless "
            "model.activations_checkpoint_granularity=full, got block; "
            "set one or the other"
        ],
    ),
    (
        ["model.optim.name=distributed_fused_adam"],
        1,
        [
            "model.optim.name must be adam, got distributed_fused_adam; "
            "distributed_fused_adam is adam with use_distributed_optimizer=true"
        ],
    ),
    (["model.optim.lr=-1"], 1, ["model.optim.lr must be above 0, got -1.0; e.g. model.optim.lr=1e-5"]),
    (["model.optim.eps=0"], 1, ["model.optim.eps must be above 0, got 0.0; e.g. model.optim.eps=1e-8"]),
    (["model.optim.weight_decay=-0.1"], 1, ["model.optim.weight_decay must be at least 0, got -0.1"]),
    (
        ["model.optim.betas=[0.9,1.0]"],
        1,
        ["model.optim.betas must be two numbers from 0 to below 1, got [0.9, 1.0]; e.g. model.optim.betas=[0.9,0.98]"],
    ),
    (
        ["model.optim.betas=[0.9]"],
        1,
        ["model.optim.betas must be two numbers from 0 to below 1, got [0.9]; e.g. model.optim.betas=[0.9,0.98]"],
    ),
    (
        ["model.optim.sched.name=cosine"],
        1,
        ["model.optim.sched.name must be CosineAnnealing, LinearAnnealing or constant, got cosine"],
    ),
    (["model.optim.sched.warmup_steps=-1"], 1, ["model.optim.sched.warmup_steps must be at least 0, got -1"]),
    (
        ["model.optim.sched.warmup_steps=20", "trainer.kto.max_steps=20"],
        1,
        ["model.optim.sched.warmup_steps must be below trainer.kto.max_steps = 20, got 20; shorten the warm-up"],
    ),
    (
        ["model.optim.lr=1e-7"],
        1,
        [
            "model.optim.sched.min_lr must be from 0 to model.optim.lr = 1e-07, got 9e-07; "
            "set both, or model.optim.sched.min_lr=0"
        ],
    ),
    (
        ["model.data.splits_string='98,x'"],
        1,
        [
            "model.data.splits_string must be up to three numbers of at least 0, the first above 0, such as "
            "\"98,1,1\", got '98,x'"
        ],
    ),
    (["model.data.seq_length=1"], 1, ["model.data.seq_length must be at least 2, got 1; a row has a prompt and an answer"]),
    (["model.data.truncation_mode=middle"], 1, ["model.data.truncation_mode must be keep_end or keep_start, got middle"]),
    (["model.data.num_workers=-1"], 1, ["model.data.num_workers must be at least 0, got -1"]),
    (["model.kto.preference_loss=dpo"], 1, ["model.kto.preference_loss must be kto or apo_zero_unpaired, got dpo"]),
    (
        ["model.kto.ref_policy_kl_penalty=0"],
        1,
        ["model.kto.ref_policy_kl_penalty must be above 0, got 0.0; e.g. model.kto.ref_policy_kl_penalty=0.1"],
    ),
    (["model.kto.desirable_loss_weight=-1"], 1, ["model.kto.desirable_loss_weight must be at least 0, got -1.0"]),
    (
        ["model.kto.desirable_loss_weight=0", "model.kto.undesirable_loss_weight=0"],
        1,
        [
            "model.kto.desirable_loss_weight and model.kto.undesirable_loss_weight must not both be 0, got 0.0 and 0.0; "
            "nothing would be learned"
        ],
    ),
    (
        ["model.kto.log_prob_forward_micro_batch_size=0"],
        1,
        ["model.kto.log_prob_forward_micro_batch_size must be at least 1, got 0"],
    ),
    (["export.max_shard_size_gb=0"], 1, ["export.max_shard_size_gb must be above 0, got 0.0; e.g. 5.0"]),
    (["export.path=''"], 1, ["export.path must name a folder, got nothing; or set export.enabled=false"]),
]


@pytest.mark.parametrize(("overrides", "world_size", "said"), BROKEN, ids=lambda value: str(value)[:50])
def test_a_rule_that_is_broken(load: Load, overrides: list[str], world_size: int, said: list[str]) -> None:
    assert problems(load(*overrides), world_size=world_size) == said


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        (["trainer.devices=4", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"], 4),
        (["trainer.devices=2", "trainer.num_nodes=2", "model.pipeline_model_parallel_size=4"], 4),
        (["trainer.max_time=00:03:45:00", "trainer.kto.val_check_interval=0", "trainer.kto.save_interval=0.25"], 1),
        (["model.global_batch_size=1", "model.kto.preference_loss=apo_zero_unpaired"], 1),
        (
            [
                "model.activations_checkpoint_granularity=full",
                "model.activations_checkpoint_method=block",
                "model.activations_checkpoint_num_layers=2",
            ],
            1,
        ),
        (["exp_manager.checkpoint_callback_params.monitor=train_rewards_chosen_mean", "model.data.splits_string=null"], 1),
        (["export.path=''", "export.enabled=false"], 1),
        (["model.optim.sched.warmup_steps=19", "trainer.kto.max_steps=20"], 1),
    ],
)
def test_what_is_right_passes(load: Load, overrides: list[str], world_size: int) -> None:
    assert problems(load(*overrides), world_size=world_size) == []


def test_everything_is_found_at_once(load: Load) -> None:
    config = load("model.optim.lr=-1", "model.peft.peft_scheme=lora", "model.data.seq_length=0", "trainer.kto.max_epochs=0")
    assert [line.split()[0] for line in problems(config, world_size=1)] == [
        "model.peft.peft_scheme",
        "model.optim.lr",
        "model.data.seq_length",
        "trainer.kto.max_epochs",
    ]


def test_a_logger_whose_package_is_missing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "installed", lambda package: package == "tensorboard")
    config = load("exp_manager.create_wandb_logger=true", "exp_manager.create_mlflow_logger=true")
    assert problems(config, world_size=1) == [
        f"exp_manager.create_{package}_logger cannot be true: the {package} logger needs the package "
        f"{package}, which is not "
        f"installed; run `pip install {package}` or set exp_manager.create_{package}_logger=false"
        for package in ("wandb", "mlflow")
    ]


def test_gpus_of_this_machine(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.cpu, "device_count", lambda: 0)
    assert problems(load("trainer.accelerator=gpu"), world_size=1) == [
        "trainer.accelerator must be cpu or auto on a machine without GPUs that torch can use, got gpu",
    ]
    monkeypatch.setattr(validate.cpu, "device_count", lambda: 2)
    assert problems(load("trainer.accelerator=auto", "trainer.devices=4"), world_size=4) == [
        "trainer.devices must be at most the 2 GPUs of this machine, got 4; use fewer ranks, or trainer.accelerator=cpu",
    ]


def test_the_form_of_a_blend(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert problems(load(f"model.data.data_prefix=[0.3,{file},0.7]"), world_size=1) == [
        f"model.data.data_prefix cannot be read: a blend must alternate weight and file, got 3 entries: [0.3, '{file}', 0.7]"
    ]


def test_names_are_those_of_the_modules_that_use_them() -> None:
    assert set(validate.SCHEDULES) == set(SCHEDULES)
    assert set(LOSSES) == {"kto", "apo_zero_unpaired"}
    sums = dict.fromkeys(
        [
            "rows", "loss_sum", "invalid_rows", "kl_rows", "kl_sum", "chosen_rows", "rejected_rows", "rewards_chosen_sum",
            "rewards_rejected_sum", "rewards_square_sum", "logps_chosen_sum", "logps_rejected_sum",
        ],
        2.0,
    )  # fmt: skip
    assert set(validate.METRICS) <= set(kto_metrics(sums))
