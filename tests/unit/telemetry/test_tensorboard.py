"""TensorBoard's own readers find hyperparameters with their metrics, histograms, and the page of essential curves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from nemo_kto.telemetry.loggers import RunLogger
from nemo_kto.telemetry.rewards import RewardHistogram

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


def test_hyperparameters_with_the_last_metrics(folder: Path) -> None:
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context, request_context = backend_context.Context(TBContext(data_provider=provider)), RequestContext()
    metadata = context.hparams_metadata(request_context, "")
    experiment = context.experiment_from_metadata(
        request_context, "", True, metadata, context.hparams_from_data_provider(request_context, "", 0)
    )
    assert {info.name.tag for info in experiment.metric_infos} == {
        "train/loss", "val/a_loss", "val/a_rewards_margin", "val/a_auc", "val/b_loss", "val/b_rewards_margin", "val/b_auc",
    }  # fmt: skip
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=9, allowed_statuses=statuses, col_params=[
            api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos
        ],
    )  # fmt: skip
    (group,) = list_session_groups.Handler(request_context, context, "", request).run().session_groups
    hparams = {key: value.number_value or value.string_value for key, value in group.hparams.items()}
    assert hparams == {
        "trainer.kto.max_epochs": 2.0, "model.kto.ref_policy_kl_penalty": 0.25, "model.kto.preference_loss": "kto",
        "model.optim.lr": 0.5, "model.optim.betas": "[0.5, 1.0]",
    }  # fmt: skip
    (session,) = group.sessions
    assert session.status == api_pb2.STATUS_SUCCESS
    values = {value.name.tag: (value.training_step, value.value) for value in session.metric_values}
    assert values == {"train/loss": (4, 0.25), "val/a_loss": (4, 0.5), "val/a_auc": (4, 1.0), "val/b_auc": (4, 0.5)}


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
