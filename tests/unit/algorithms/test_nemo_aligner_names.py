"""Trainers and collate functions accept NeMo-Aligner's names and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from nemo_kto.algorithms.dpo import DPOTrainer, dpo_custom_collate
from nemo_kto.algorithms.kto import KTOTrainer, kto_custom_collate
from nemo_kto.data.batches.dataset import DPOExample, KTOExample
from nemo_kto.data.batches.loader import GlobalBatchSampler
from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.watch import RunTimer
from tests.unit.algorithms.trainer_doubles import LEARNING_RATE, Descent, Mean, Notebook, Schedule

EOS = 0
SECTION = {
    "max_epochs": 1,
    "max_steps": 1,
    "val_check_interval": 0.1,
    "save_interval": 100,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "gradient_clip_val": 1.0,
}  # the section trainer.kto of a configuration
CONTRACT = ["cfg", "model", "optimizer", "scheduler", "train_dataloader", "val_dataloader", "test_dataloader"]
CONTRACT += ["collate_fn", "logger", "ckpt_callback", "run_timer"]


REWARDS = {"chosen_reward": 2.0, "rejected_reward": 0.5}
SINGLES = [
    KTOExample(prompt_ids=[1, 2], response_ids=[3, EOS], desirable=True),
    KTOExample(prompt_ids=[4], response_ids=[5, 6, EOS], desirable=False),
]
PAIRS = [
    DPOExample(prompt_ids=[1, 2], chosen_ids=[3, EOS], rejected_ids=[5, 6, EOS], **REWARDS),
    DPOExample(prompt_ids=[4], chosen_ids=[7, EOS], rejected_ids=[8, EOS], **REWARDS),
]


class Batches(Mean):
    """Learns the mean of a number of each batch, and has a reference."""

    def __init__(self, number: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.number = number

    def get_loss_and_metrics(self, batch: dict[str, torch.Tensor], forward_only: bool) -> tuple[float, Metrics]:
        return super().get_loss_and_metrics({"x": self.number(batch).double()}, forward_only)

    def get_ref_policy_logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return -torch.arange(1.0, 5.0)


def loader(items: list[Any], collate_fn: Callable[[Any], Any], *, training: bool) -> DataLoader[Any]:
    sampler = GlobalBatchSampler(num_examples=2, global_batch_size=2, seed=5, shuffle=False, drop_last=training)
    return DataLoader(items, batch_sampler=sampler, collate_fn=collate_fn)  # type: ignore[arg-type]


def parts(model: Batches, items: list[Any], collate_fn: Callable[[Any], Any]) -> dict[str, Any]:
    optimizer, notes = Descent(model.weight), Notebook()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": Schedule(optimizer),
        "train_dataloader": loader(items, collate_fn, training=True),
        "val_dataloader": loader(items, collate_fn, training=False),
        "test_dataloader": None,
        "logger": notes,
        "ckpt_callback": notes,
        "run_timer": RunTimer(max_time=None),
    }


@pytest.mark.parametrize("cfg", [SECTION, OmegaConf.create(SECTION)], ids=["dict", "DictConfig"])
def test_kto_trainer(cfg: Mapping[str, Any]) -> None:
    model = Batches(lambda batch: batch["ref_policy_log_probs_kl_samples"] - batch["ref_policy_log_probs_samples"])
    trainer = KTOTrainer(cfg=cfg, **parts(model, SINGLES, partial(kto_custom_collate, eos_id=EOS)))
    trainer.fit()
    assert float(model.weight) == LEARNING_RATE * -2.0, "one step: -3 - -1 and -4 - -2, the two halves"
    assert trainer.state_dict() | {"step": 1, "epoch": 1, "consumed_samples": 2} == trainer.state_dict()
    loss, metrics = trainer.run_validation()
    assert (loss, metrics["rows"]) == ((-2.0 - LEARNING_RATE * -2.0) ** 2 / 2, 2)


def test_dpo_trainer() -> None:
    model = Batches(lambda batch: batch["chosen_rewards"] - batch["ref_policy_log_probs_rejected"])
    collate = partial(dpo_custom_collate, eos_id=EOS)
    trainer = DPOTrainer(cfg=SECTION, collate_fn=collate, **parts(model, PAIRS, lambda items: items))
    trainer.fit()
    assert float(model.weight) == LEARNING_RATE * (2.0 + 3.5)


def test_constructor_arguments() -> None:
    own = {"timers", "callbacks", "skipped", "early_stopping", "best_validation", "prefetch"}
    for trainer, names in ((DPOTrainer, CONTRACT), (KTOTrainer, [name for name in CONTRACT if name != "collate_fn"])):
        arguments = inspect.signature(trainer).parameters
        assert [name for name in arguments if name not in own] == names
        assert {argument.kind for argument in arguments.values()} == {inspect.Parameter.KEYWORD_ONLY}
        with_defaults = {name for name, argument in arguments.items() if argument.default is not argument.empty}
        assert with_defaults - {"collate_fn"} == own
