"""Each rule beyond the types: the exact text where it is broken, and silence where it is not.

Those of the machine, the run folder, the files, the layout and the data; ALGORITHM stands for the name of each algorithm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.launch import job, rules
from nemo_kto.losses.kto import kto_metrics
from nemo_kto.losses.preference import preference_metrics
from nemo_kto.recipes import DPO, KTO, Recipe
from tests.messages import assert_names
from tests.unit.launch.conftest import Said, of

# Overrides, number of ranks, what is said.
STOPPING = "exp_manager.create_early_stopping_callback"
BROKEN = [
    (["trainer.num_nodes=0"], 1, ["trainer.num_nodes must be at least 1, got 0"]),
    (["trainer.devices=0"], 1, ["trainer.devices must be at least 1, got 0; use auto for one rank a GPU"]),
    (["trainer.devices=all"], 1, ["trainer.devices must be an integer or auto, got 'all'"]),
    (
        ["trainer.devices=2", "trainer.num_nodes=2"],
        3,
        [
            "trainer.devices must fit the ranks that were started (trainer.num_nodes * trainer.devices = 2 * 2 = 4), got 3; "
            "start 4 ranks or set trainer.num_nodes and trainer.devices to what you started",
            "model.global_batch_size must be divisible by the number of data-parallel ranks = 3, got 64; use 63 or 66",
        ],
    ),
    (
        ["trainer.devices=1"],
        2,
        [
            "trainer.devices must fit the ranks that were started (trainer.num_nodes * trainer.devices = 1 * 1 = 1), got 2; "
            "start 1 ranks or set trainer.num_nodes and trainer.devices to what you started"
        ],
    ),
    (["trainer.accelerator=tpu"], 1, ["trainer.accelerator must be auto, cpu or gpu, got tpu"]),
    *(
        (
            [f"trainer.precision={precision}"],
            1,
            [
                "trainer.precision must be auto, bf16, 32, bf16-mixed, bf16-true, 32-true or fp32, "
                f"got {precision}; fp16 and fp64 are not supported"
            ],
        )
        for precision in ("fp16", "16-mixed")
    ),
    (["trainer.timeout_minutes=0"], 1, ["trainer.timeout_minutes must be at least 1, got 0"]),
    (
        ["trainer.max_time=03:45:00"],
        1,
        [
            "trainer.max_time must be written DD:HH:MM:SS (days:hours:minutes:seconds), got 03:45:00; "
            "e.g. trainer.max_time=00:03:45:00"
        ],
    ),
    (["trainer.ALGORITHM.max_epochs=0"], 1, ["trainer.ALGORITHM.max_epochs must be at least 1, got 0"]),
    (["trainer.ALGORITHM.max_steps=0"], 1, ["trainer.ALGORITHM.max_steps must be at least 1, got 0; use -1 for no limit"]),
    (
        ["trainer.ALGORITHM.gradient_clip_val=-1"],
        1,
        ["trainer.ALGORITHM.gradient_clip_val must be at least 0, got -1; 0 switches clipping off"],
    ),
    (
        ["trainer.ALGORITHM.val_check_interval=-1"],
        1,
        ["trainer.ALGORITHM.val_check_interval must be an integer of at least 0, or a fraction from 0.0 to 1.0, got -1"],
    ),
    (
        ["trainer.ALGORITHM.save_interval=1.5"],
        1,
        ["trainer.ALGORITHM.save_interval must be an integer of at least 0, or a fraction from 0.0 to 1.0, got 1.5"],
    ),
    (
        ["trainer.ALGORITHM.limit_val_batches=nan"],
        1,
        ["trainer.ALGORITHM.limit_val_batches must be an integer of at least 0, or a fraction from 0.0 to 1.0, got nan"],
    ),
    (
        ["trainer.ALGORITHM.limit_train_batches=0.0"],
        1,
        ["trainer.ALGORITHM.limit_train_batches must be above 0, got 0.0; use 1.0 for all"],
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
            "-1 keeps all checkpoints, 0 only the last"
        ],
    ),
    (["exp_manager.explicit_log_dir=''"], 1, ["exp_manager.explicit_log_dir must not be empty, got nothing"]),
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
        ["model.data.data_prefix must be a string, a list or a mapping, got null"],
    ),
    (
        ["model.data.data_prefix=''"],
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
        ["model.data.packing=true", "model.data.reset_attention_mask=true"],
        1,
        [
            "model.data.reset_attention_mask must be false with model.data.packing=true, whose rows of sequences take no "
            "mask, got true; set one or the other"
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
        ["model.sequence_parallel=true"],
        1,
        [
            "model.sequence_parallel needs model.tensor_model_parallel_size above 1, got 1; "
            "raise it or set model.sequence_parallel=false"
        ],
    ),
    (
        ["model.data.splits_string='98,x'"],
        1,
        ['model.data.splits_string must be auto, or up to three numbers, the first above 0, such as "98,2", got 98,x'],
    ),
    (
        ["model.data.fields={prompt:question,promt:x}"],
        1,
        [
            "model.data.fields must map names out of prompt, response, completion, messages, preference, label, chosen, "
            "rejected, chosen_response, rejected_response, chosen_reward, rejected_reward, tools, chat_template_kwargs, "
            "weight to columns, got promt; did you mean prompt?"
        ],
    ),
    (["model.data.seq_length=1"], 1, ["model.data.seq_length must be at least 2, got 1; a row has a prompt and an answer"]),
    (["model.data.truncation_mode=middle"], 1, ["model.data.truncation_mode must be keep_end or keep_start, got middle"]),
    (["model.data.num_workers=-1"], 1, ["model.data.num_workers must be at least 0, got -1"]),
    (["export.max_shard_size_gb=0"], 1, ["export.max_shard_size_gb must be above 0, got 0; e.g. 5.0"]),
    (["export.path=''"], 1, ["export.path must name a folder, got nothing; or set export.enabled=false"]),
    (
        ["export.path=results/out", "export.adapter_path=results/./out", "model.peft.peft_scheme=lora"],
        1,
        ["export.adapter_path must be another folder than export.path, got results/./out for both; merged weights go there"],
    ),
    (["export.adapter_path=''"], 1, ["export.adapter_path must name a folder, got nothing; or set export.enabled=false"]),
    (["export.which=newest"], 1, ["export.which must be last or best, got newest"]),
    (
        [
            "export.which=best",
            "exp_manager.checkpoint_callback_params={monitor: train_loss, save_top_k: 0}",
            "trainer.ALGORITHM.save_interval=0",
            "trainer.ALGORITHM.limit_val_batches=0",
            "model.data.splits_string=null",
        ],
        1,
        [
            "exp_manager.checkpoint_callback_params.save_top_k must not be 0 with export.which=best, got 0; change it, "
            "or set export.which=last",
            "exp_manager.checkpoint_callback_params.monitor must start with val_ with export.which=best, got train_loss; "
            "change it, or set export.which=last",
            "trainer.ALGORITHM.save_interval must be above 0 with export.which=best, got 0; change it, "
            "or set export.which=last",
            "trainer.ALGORITHM.limit_val_batches must be above 0 with export.which=best, got 0; change it, "
            "or set export.which=last",
            "model.data.splits_string must leave rows for validation with export.which=best, got null; "
            'e.g. "90,10", or set export.which=last',
        ],
    ),
    (
        ["export.which=best", "model.data.splits_string='98,0,2'"],
        1,
        [
            "model.data.splits_string must leave rows for validation with export.which=best, got 98,0,2; "
            'e.g. "90,10", or set export.which=last'
        ],
    ),
    (
        [
            f"{STOPPING}=true",
            "exp_manager.checkpoint_callback_params.monitor=train_loss",
            "trainer.ALGORITHM.val_check_interval=0",
            "trainer.ALGORITHM.limit_val_batches=0",
            "model.data.splits_string=null",
        ],
        1,
        [
            f"exp_manager.early_stopping_callback_params.monitor must start with val_ with {STOPPING}=true, got train_loss; "
            f"change it, or set {STOPPING}=false",
            f"trainer.ALGORITHM.val_check_interval must be above 0 with {STOPPING}=true, got 0; change it, "
            f"or set {STOPPING}=false",
            f"trainer.ALGORITHM.limit_val_batches must be above 0 with {STOPPING}=true, got 0; change it, "
            f"or set {STOPPING}=false",
            f"model.data.splits_string must leave rows for validation with {STOPPING}=true, got null; "
            f'e.g. "90,10", or set {STOPPING}=false',
        ],
    ),
    (
        ["exp_manager.early_stopping_callback_params={patience: 0, min_delta: -1, mode: best}"],
        1,
        [
            "exp_manager.early_stopping_callback_params.mode must be min or max, got best",
            "exp_manager.early_stopping_callback_params.min_delta must be at least 0, got -1; 0: every improvement counts",
            "exp_manager.early_stopping_callback_params.patience must be at least 1, got 0",
        ],
    ),
]


@pytest.mark.parametrize(("overrides", "world_size", "texts"), BROKEN, ids=lambda value: str(value)[:50])
def test_a_rule_that_is_broken(said: Said, overrides: list[str], world_size: int, texts: list[str]) -> None:
    assert said(*of(KTO, overrides), ranks=world_size) == of(KTO, texts)


def test_the_other_algorithms_have_the_same_rules(said: Said, other: Recipe) -> None:
    found = [said(*of(other, overrides), recipe=other, ranks=world_size) for overrides, world_size, _ in BROKEN]
    assert found == [of(other, texts) for *_, texts in BROKEN]


# Overrides and number of ranks, of which nothing is said.
RIGHT = [
    ([], 1),
    (["trainer.devices=4", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"], 4),
    (["trainer.devices=2", "trainer.num_nodes=2", "model.pipeline_model_parallel_size=4"], 4),
    (
        [
            "trainer.max_time=00:03:45:00",
            "trainer.ALGORITHM.val_check_interval=0",
            "trainer.ALGORITHM.save_interval=0.25",
        ],
        1,
    ),
    (["exp_manager.checkpoint_callback_params.monitor=train_rewards_chosen_mean", "model.data.splits_string=null"], 1),
    (["export.path=''", "export.adapter_path=''", "export.enabled=false"], 1),
    (["export.path=out", "export.adapter_path=out"], 1),  # no adapters, none written
    (["export.path=out", "export.adapter_path=out", "export.enabled=false", "model.peft.peft_scheme=lora"], 1),
    (["export.which=best", "trainer.ALGORITHM.save_interval=0.25"], 1),
    (["export.which=best", "export.enabled=false", "model.data.splits_string=null"], 1),
    ([f"{STOPPING}=true", "exp_manager.early_stopping_callback_params.monitor=val_rewards_margin"], 1),
    (["export.max_shard_size_gb=0.5", "model.data.num_workers=2"], 1),
]


@pytest.mark.parametrize(("overrides", "world_size"), RIGHT, ids=lambda value: str(value)[:50])
def test_what_is_right_passes(said: Said, overrides: list[str], world_size: int) -> None:
    assert said(*of(KTO, overrides), ranks=world_size) == []


def test_what_is_right_passes_with_the_other_algorithms(said: Said, other: Recipe) -> None:
    wrong = {
        str(overrides): given
        for overrides, world_size in RIGHT
        if (given := said(*of(other, overrides), recipe=other, ranks=world_size))
    }
    assert wrong == {}


def test_everything_is_found_at_once(said: Said, recipe: Recipe) -> None:
    wrong = [
        "trainer.precision=8",
        "exp_manager.checkpoint_callback_params.mode=best",
        "pretrained_checkpoint.restore_from_path=/nowhere",
        "model.fp8=hybrid",
        "model.activations_checkpoint_num_layers=1",
        "model.optim.lr=-1",
        "model.ALGORITHM.ref_policy_kl_penalty=-1",
        "model.reference.mode=lora",
        "model.peft.peft_scheme=dora",
        "model.data.seq_length=0",
        "export.max_shard_size_gb=0",
        "trainer.ALGORITHM.max_epochs=0",
        "model.tensor_model_parallel_size=0",
    ]
    keys = [override.split("=")[0] for override in of(recipe, wrong)]
    assert sorted(line.split()[0] for line in said(*of(recipe, wrong), recipe=recipe)) == sorted(keys)


def test_a_logger_whose_package_is_missing(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "installed", lambda package: package == "tensorboard")
    assert said("exp_manager.create_wandb_logger=true", "exp_manager.create_mlflow_logger=true") == [
        f"exp_manager.create_{package}_logger cannot be true: the {package} logger needs the package "
        f"{package}, which is not "
        f"installed; run `pip install {package}` or set exp_manager.create_{package}_logger=false"
        for package in ("wandb", "mlflow")
    ]


def test_a_run_folder_that_cannot_be_made(said: Said, tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    (message,) = said(f"exp_manager.explicit_log_dir={tmp_path}/notes/run")
    assert_names(message, "exp_manager.explicit_log_dir", f"{tmp_path}/notes/run", f"{tmp_path}/notes", "exp_manager.name")
    assert said(f"exp_manager.explicit_log_dir={tmp_path}/new/run") == []
    (message,) = said("exp_manager.explicit_log_dir=/proc/run")
    assert_names(message, "/proc")


def test_gpus_of_this_machine(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.device, "device_count", lambda: 0)
    assert said("trainer.accelerator=gpu") == [
        "trainer.accelerator must be cpu or auto on a machine without GPUs that torch can use, got gpu",
    ]
    monkeypatch.setattr(job.device, "device_count", lambda: 2)
    assert said("trainer.accelerator=auto", "trainer.devices=4", ranks=4) == [
        "trainer.devices must be at most the 2 GPUs of this machine, got 4; use fewer ranks, or trainer.accelerator=cpu",
    ]
    assert said("trainer.accelerator=gpu", "trainer.devices=2", ranks=2) == []
    assert said("trainer.accelerator=cpu", "trainer.devices=4", ranks=4) == []


def test_ranks_that_see_one_gpu_each(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.device, "device_count", lambda: 1)
    two_machines = ["trainer.accelerator=gpu", "trainer.devices=8", "trainer.num_nodes=2"]
    assert said(*two_machines, "model.global_batch_size=16", ranks=16) == []
    started_here = said("trainer.accelerator=gpu", "trainer.devices=8", "model.global_batch_size=8")
    remedy = "use fewer ranks, or trainer.accelerator=cpu"
    assert started_here == [f"trainer.devices must be at most the one GPU of this machine, got 8; {remedy}"]


@pytest.mark.parametrize("devices", ["trainer.devices=2", "trainer.devices=auto"])
@pytest.mark.parametrize("accelerator", ["gpu", "auto"])
def test_ranks_of_torchrun_on_one_gpu(devices: str, accelerator: str, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.device, "device_count", lambda: 1)
    given = (devices, f"trainer.accelerator={accelerator}", "model.global_batch_size=8")
    remedy = "use fewer ranks, or trainer.accelerator=cpu"
    assert said(*given, ranks=2, torchrun=True) == [
        f"trainer.devices must be at most the one GPU of this machine, got 2; {remedy}"
    ]
    monkeypatch.setattr(job.device, "device_count", lambda: 2)
    assert said(*given, ranks=2, torchrun=True) == []


def test_the_form_of_a_blend(said: Said, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert said(f"model.data.data_prefix=[0.3,{file},0.7]") == [
        f"model.data.data_prefix cannot be read: a blend must alternate weight and file, got 3 entries: [0.3, '{file}', 0.7]"
    ]


MONITOR = "exp_manager.checkpoint_callback_params.monitor"
OFFERED = {
    "kto": "loss, preference_loss, sft_loss, rewards_margin, rewards_chosen_mean, rewards_rejected_mean, rewards_all_mean, "
    "rewards_all_std, logps_chosen_mean, logps_rejected_mean, kl",
    "dpo": "loss, preference_loss, sft_loss, rewards_margin, rewards_chosen_mean, rewards_rejected_mean, rewards_all_mean, "
    "rewards_all_std, logps_chosen_mean, logps_rejected_mean, acc, rewards_margin_std",
}


@pytest.mark.parametrize("metric", ["val_los", "loss", "test_loss", "val"])
def test_a_metric_that_is_none_is_met_with_those_there_are(said: Said, recipe: Recipe, metric: str) -> None:
    assert said(f"{MONITOR}={metric}", recipe=recipe) == [
        f"{MONITOR} must be val_ or train_ and one of {OFFERED[recipe.name]}, got {metric}; e.g. val_loss"
    ]


def test_each_metric_that_is_offered_can_be_monitored(said: Said, recipe: Recipe) -> None:
    offered = OFFERED[recipe.name].split(", ")
    assert offered == [*recipe.metrics, *(["kl"] if recipe is KTO else [])]
    for metric in offered:
        assert said(f"{MONITOR}=val_{metric}", recipe=recipe) == []


@pytest.mark.parametrize(("recipe", "metric"), [(KTO, "val_acc"), (DPO, "val_kl")])
def test_a_metric_of_the_other_algorithm(said: Said, recipe: Recipe, metric: str) -> None:
    (text,) = said(f"{MONITOR}={metric}", recipe=recipe)
    assert text.endswith(f", got {metric}; e.g. val_loss")


@pytest.mark.parametrize(
    ("loss", "metric", "anchor"),
    [("apo_zero_unpaired", "kl", ""), ("bco", "kl", ", delta"), ("kto", "delta", ", kl")],
)
def test_a_metric_of_another_loss(said: Said, loss: str, metric: str, anchor: str) -> None:
    offered = OFFERED["kto"].removesuffix(", kl") + anchor
    assert said(f"{MONITOR}=val_{metric}", f"model.kto.preference_loss={loss}") == [
        f"{MONITOR} must be val_ or train_ and one of {offered}, got val_{metric}; e.g. val_loss"
    ]
    if anchor:
        assert said(f"{MONITOR}=train_{anchor[2:]}", f"model.kto.preference_loss={loss}") == []


def test_the_metrics_are_those_that_the_losses_report() -> None:
    shared = ["rows", "loss_sum", "invalid_rows", "preference_loss_sum", "sft_loss_sum", "rewards_chosen_sum"]
    shared += [
        "weighted_preference_loss_sum",
        "weighted_sft_loss_sum",
        "rewards_rejected_sum",
        "rewards_square_sum",
        "logps_chosen_sum",
        "logps_rejected_sum",
    ]
    of_rows = dict.fromkeys(
        [*shared, "kl_rows", "kl_sum", "delta_sum", "delta_batches", "chosen_rows", "rejected_rows"], 2.0
    )
    of_pairs = dict.fromkeys([*shared, "correct", "margin_square_sum"], 2.0)
    counts = {"rows", "invalid_rows", "kl_unclamped"}
    assert {*KTO.metrics, *KTO.anchors.values()} == set(kto_metrics(of_rows)) - counts
    assert set(DPO.metrics) == set(preference_metrics(of_pairs)) - counts


def test_the_best_checkpoint_needs_rows_for_validation(said: Said, tmp_path: Path) -> None:
    rows = f"{tmp_path}/rows.jsonl"
    named = [f"model.data.data_prefix={{train: {rows}, test: {rows}}}", "export.which=best"]
    assert said(*named) == [
        "model.data.data_prefix must name rows for validation with export.which=best, got those for train or test; "
        "add them, or set export.which=last"
    ]
    assert said(*named[:1]) == []
    assert said(f"model.data.data_prefix={{train: {rows}, validation: {rows}}}", "export.which=best") == []
