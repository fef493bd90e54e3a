"""TensorBoard's own readers find hyperparameters with their metrics, histograms, and the page of essential curves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from nemo_kto.telemetry.evaluations import RewardHistogram
from nemo_kto.telemetry.loggers import RunLogger

CONFIG = {
    "algorithm": "kto",
    "trainer": {"devices": 1, "kto": {"max_epochs": 2, "save_interval": 0}},
    "model": {"kto": {"ref_policy_kl_penalty": 0.25, "preference_loss": "kto"}, "optim": {"lr": 0.5, "betas": [0.5, 1.0]}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    logger = RunLogger(folder=folder, enabled=True, val_prefixes=["val/a_", "val/b_"])
    logger.log_hyperparams(CONFIG)
    for step in (2, 4):
        metrics = {"train/loss": 1 / step, "val/a_loss": 2 / step, "val/a_auc": 0.25 * step, "val/b_auc": 0.5}
        logger.log_metrics(
            {**metrics, "timing/step_time": 1.5, "timing/forward_max": 2.5, "timing/forward_max_rank": 3}, step
        )
        rewards = {"desirable": torch.tensor([1.0, 2.0, 2.0]), "undesirable": torch.tensor([-1.0, -step])}
        found = RewardHistogram.of("a", rewards)
        assert found is not None
        logger.log_rewards([found], step)
    logger.finalize("success")
    return folder / "tensorboard"


@pytest.fixture(scope="module")
def events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    return events.Reload()


def test_hyperparameters_with_their_metrics(events: EventAccumulator) -> None:
    content = events.PluginTagToContent("hparams")
    experiment, start = (content[f"_hparams_/{name}"] for name in ("experiment", "session_start_info"))
    names = [
        b"train/loss",
        *(b"val/%c_%b" % (each, name) for each in b"ab" for name in (b"loss", b"rewards_margin", b"auc")),
    ]
    assert [name for name in names if name not in experiment] == []
    settings = [b"trainer.kto.max_epochs", b"model.kto.ref_policy_kl_penalty", b"model.optim.betas", b"[0.5, 1.0]"]
    assert [name for name in settings if name not in start] == []
    assert b"save_interval" not in start
    assert "_hparams_/session_end_info" in content


def test_a_resumed_run_replaces_later_events(tmp_path: Path) -> None:
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3,))):
        logger = RunLogger(folder=tmp_path, enabled=True, resumed_step=resumed_step)
        for step in steps:
            logger.log_metrics({"train/loss": 0.5 / step if resumed_step is None else 0.125}, step)
        logger.finalize("success")
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_histograms_of_rewards(events: EventAccumulator) -> None:
    assert {"val/a_rewards_desirable", "val/a_rewards_undesirable"} <= {*events.Tags()["histograms"]}
    first, second = events.Histograms("val/a_rewards_undesirable")
    assert (first.step, second.step) == (2, 4)
    values = first.histogram_value
    assert (values.num, sum(values.bucket), values.min) == (2, 2, -2.0)
    filled = [limit for limit, count in zip(values.bucket_limit, values.bucket, strict=True) if count]
    assert filled == [-2.0 + 0.0625, -1.0 + 0.0625], "the right edges"


def test_times_of_single_ranks_are_on_a_page_of_their_own(events: EventAccumulator) -> None:
    scalars = {tag.partition("/")[0]: set[str]() for tag in events.Tags()["scalars"]}
    for tag in events.Tags()["scalars"]:
        scalars[tag.partition("/")[0]].add(tag)
    assert scalars["ranks"] == {"ranks/forward_max", "ranks/forward_max_rank"}
    assert scalars["timing"] == {"timing/step_time"}


def test_the_page_of_essential_curves(events: EventAccumulator) -> None:
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (page,) = layout.category
    charts = {chart.title: [*chart.multiline.tag] for chart in page.chart}
    assert [*charts][:5] == ["loss", "rewards", "margin", "kl", "auc or accuracy"]
    assert [*charts][5:] == ["gradient norm", "learning rate", "tokens/s"]
    assert charts["loss"] == ["train/loss$", "val/a_loss$", "val/b_loss$"]
    assert charts["auc or accuracy"] == ["train/acc$", "val/a_auc$", "val/a_acc$", "val/b_auc$", "val/b_acc$"]
