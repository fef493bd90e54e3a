"""Rules of the machine, run folder, files, layout and data: the error of each violation, and no error otherwise.

ALGORITHM stands for the name of each algorithm.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import DPO, KTO, RECIPES, Recipe
from nemo_kto.algorithms.recipes.recipe import LARGER_IS_BETTER
from nemo_kto.cli import job
from nemo_kto.losses.kto import kto_metrics
from nemo_kto.losses.preference import preference_metrics
from tests.helpers.messages import Message, read_cases
from tests.unit.config.test_rules_layout import BATCH, ONE_BY_ONE
from tests.unit.config.test_rules_layout import model as mixture
from tests.unit.conftest import FindErrors, of

# Overrides, number of ranks, errors.
STOPPING = "exp_manager.create_early_stopping_callback"
STOPPED_BY = "exp_manager.early_stopping_callback_params"
RANKED = (STOPPED_BY, "exp_manager.checkpoint_callback_params")


CASES = list(read_cases(Path(__file__).with_name("rules.txt")))


@pytest.mark.parametrize(("case", "expected"), CASES, ids=lambda value: str(value)[:50])
def test_violated_rules(find_errors: FindErrors, tmp_path: Path, case: str, expected: list[Message]) -> None:
    words = shlex.split(case.partition("] ")[2] if case.startswith("[") else case)
    settings = dict(word.split("=") for word in case[1:].partition("] ")[0].split()) if case.startswith("[") else {}
    if "model" in settings:
        folder = mixture(tmp_path / "mixture", settings["model"])
        words = [f"pretrained_checkpoint.restore_from_path={folder}", BATCH, ONE_BY_ONE, *words]
    for recipe in [RECIPES[settings["algorithm"]]] if "algorithm" in settings else RECIPES.values():
        stands = {"ALGORITHM": recipe.name} | {
            name: f"{tmp_path}/{name.lower()}" for name in ("ADAPTER", "MODEL", "MIXTURE")
        }
        given, messages = words, expected
        for name, value in stands.items():
            given = [word.replace(name, value) for word in given]
            messages = [message.replace(name, value) for message in messages]
        assert find_errors(*given, recipe=recipe, ranks=int(settings.get("ranks", 1))) == messages


# Valid overrides and number of ranks.
RIGHT = [
    ([], 1),
    (["trainer.devices=4", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"], 4),
    (["trainer.devices=2", "trainer.num_nodes=2", "model.pipeline_model_parallel_size=4"], 4),
    (["trainer.max_time=00:03:45:00", "trainer.ALGORITHM.val_check_interval=0", "trainer.ALGORITHM.save_interval=0.25"], 1),
    (["exp_manager.checkpoint_callback_params.monitor=train_rewards_chosen_mean", "model.data.splits_string=null"], 1),
    (["export.path=''", "export.adapter_path=''", "export.enabled=false"], 1),
    (["export.path=out", "export.adapter_path=out", "export.enabled=false", "model.peft.peft_scheme=lora"], 1),
    (["export.which=best", "trainer.ALGORITHM.save_interval=0.25"], 1),
    ([f"{STOPPED_BY}.monitor=val_rewards_margin", f"{STOPPED_BY}.mode=max"], 1),  # not used
    (
        [
            f"{STOPPING}=true",
            *(f"{each}.monitor=val_rewards_margin" for each in RANKED),
            *(f"{each}.mode=max" for each in RANKED),
        ],
        1,
    ),
]


@pytest.mark.parametrize(("overrides", "world_size"), RIGHT, ids=lambda value: str(value)[:50])
def test_valid_settings_pass(find_errors: FindErrors, overrides: list[str], world_size: int) -> None:
    assert find_errors(*of(KTO, overrides), ranks=world_size) == []


def test_valid_settings_pass_with_other_algorithms(find_errors: FindErrors, other: Recipe) -> None:
    wrong = {
        str(overrides): given
        for overrides, world_size in RIGHT
        if (given := find_errors(*of(other, overrides), recipe=other, ranks=world_size))
    }
    assert wrong == {}


def test_all_errors_are_reported_together(find_errors: FindErrors, recipe: Recipe) -> None:
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
    assert sorted(line.split()[0] for line in find_errors(*of(recipe, wrong), recipe=recipe)) == sorted(keys)


def test_number_of_gpus(find_errors: FindErrors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.device, "device_count", lambda: 0)
    assert find_errors("trainer.accelerator=gpu") == [Message("trainer.accelerator", "cpu", "auto", "GPUs", "torch", "gpu")]
    monkeypatch.setattr(job.device, "device_count", lambda: 2)
    assert find_errors("trainer.accelerator=auto", "trainer.devices=4", ranks=4) == [
        Message("trainer.devices", "2", "GPUs", "4", "trainer.accelerator=cpu")
    ]
    assert find_errors("trainer.accelerator=gpu", "trainer.devices=2", ranks=2) == []
    assert find_errors("trainer.accelerator=cpu", "trainer.devices=4", ranks=4) == []


@pytest.mark.parametrize("devices", ["trainer.devices=2", "trainer.devices=auto"])
@pytest.mark.parametrize("accelerator", ["gpu", "auto"])
def test_ranks_of_torchrun_on_one_gpu(
    devices: str, accelerator: str, find_errors: FindErrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.device, "device_count", lambda: 1)
    given = (devices, f"trainer.accelerator={accelerator}", "model.global_batch_size=8")
    assert find_errors(*given, ranks=2, torchrun=True) == [Message("trainer.devices", "GPU", "2", "trainer.accelerator=cpu")]
    monkeypatch.setattr(job.device, "device_count", lambda: 2)
    assert find_errors(*given, ranks=2, torchrun=True) == []


MONITOR = "exp_manager.checkpoint_callback_params.monitor"
MODE = "exp_manager.checkpoint_callback_params.mode"


def mode_of(metric: str) -> str:
    """The mode that looks for the best value of a metric."""
    return "max" if metric in LARGER_IS_BETTER else "min"


OFFERED = {
    "kto": "loss, preference_loss, sft_loss, rewards_margin, rewards_chosen_mean, rewards_rejected_mean, rewards_all_mean, "
    "rewards_all_std, logps_chosen_mean, logps_rejected_mean, kl",
    "dpo": "loss, preference_loss, sft_loss, rewards_margin, rewards_chosen_mean, rewards_rejected_mean, rewards_all_mean, "
    "rewards_all_std, logps_chosen_mean, logps_rejected_mean, acc, rewards_margin_std",
}


@pytest.mark.parametrize("metric", ["val_los", "loss", "test_loss", "val"])
def test_an_unknown_metric_lists_the_available_ones(find_errors: FindErrors, recipe: Recipe, metric: str) -> None:
    assert find_errors(f"{MONITOR}={metric}", recipe=recipe) == [
        Message(MONITOR, "val_", "train_", f"{OFFERED[recipe.name]}", f"{metric}", "val_loss")
    ]


def test_the_auc_is_a_metric_of_kto_validations(find_errors: FindErrors) -> None:
    assert find_errors(f"{MONITOR}=val_auc", f"{MODE}=max", f"{STOPPING}=true", "export.which=best") == []
    assert find_errors(f"{MONITOR}=train_auc") == [
        Message(MONITOR, "val_", "train_", OFFERED["kto"], "val_auc", "train_auc", "val_loss")
    ]
    assert find_errors(f"{MONITOR}=val_auc", f"{MODE}=max", recipe=DPO) == [
        Message(MONITOR, "val_", "train_", OFFERED["dpo"], "val_auc", "val_loss")
    ]


@pytest.mark.parametrize(("metric", "wrong", "right"), [("val_auc", "min", "max"), ("val_sft_loss", "max", "min")])
def test_the_mode_does_not_look_for_the_worst_value(find_errors: FindErrors, metric: str, wrong: str, right: str) -> None:
    mode = Message(MODE, right, metric, wrong)
    assert find_errors(f"{MONITOR}={metric}", f"{MODE}={wrong}") == [mode]
    assert find_errors(f"{MONITOR}={metric}", f"{MODE}={wrong}", f"{STOPPING}=true") == [mode], "once"
    assert find_errors(f"{MONITOR}=val_kl", f"{MODE}=max") == find_errors(f"{MONITOR}=val_kl", f"{MODE}=min") == []


@pytest.mark.parametrize(
    ("loss", "metric", "anchor"), [("apo_zero_unpaired", "kl", ""), ("bco", "kl", ", delta"), ("kto", "delta", ", kl")]
)
def test_a_metric_of_another_loss(find_errors: FindErrors, loss: str, metric: str, anchor: str) -> None:
    offered = OFFERED["kto"].removesuffix(", kl") + anchor
    assert find_errors(f"{MONITOR}=val_{metric}", f"model.kto.preference_loss={loss}") == [
        Message(MONITOR, "val_", "train_", f"{offered}", f"val_{metric}", "val_loss")
    ]
    if anchor:
        assert find_errors(f"{MONITOR}=train_{anchor[2:]}", f"model.kto.preference_loss={loss}") == []


def test_listed_metrics_equal_those_of_the_losses() -> None:
    shared = (
        "rows invalid_rows loss_sum preference_loss_sum sft_loss_sum weighted_preference_loss_sum weighted_sft_loss_sum "
        "rewards_chosen_sum rewards_rejected_sum rewards_square_sum logps_chosen_sum logps_rejected_sum"
    )
    of_rows = dict.fromkeys(f"{shared} kl_rows kl_sum delta_sum delta_batches chosen_rows rejected_rows".split(), 2.0)
    of_pairs = dict.fromkeys(f"{shared} sft_count correct margin_square_sum".split(), 2.0)
    counts = {"rows", "invalid_rows", "kl_unclamped"}
    assert {*KTO.metrics, *KTO.anchors.values()} == set(kto_metrics(of_rows)) - counts
    assert set(DPO.metrics) == set(preference_metrics(of_pairs)) - counts


def test_the_best_checkpoint_needs_rows_for_validation(find_errors: FindErrors, tmp_path: Path) -> None:
    rows = f"{tmp_path}/rows.jsonl"
    named = [f"model.data.data_prefix={{train: {rows}, test: {rows}}}", "export.which=best"]
    assert find_errors(*named) == [
        Message("model.data.data_prefix", "validation", "export.which=best", "those", "train", "test", "export.which=last")
    ]
    assert find_errors(*named[:1]) == []
    assert find_errors(f"model.data.data_prefix={{train: {rows}, validation: {rows}}}", "export.which=best") == []
