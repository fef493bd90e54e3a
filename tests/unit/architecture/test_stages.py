"""Layers of a pipeline stage, compared with megatron-core's own functions, and the number of in-flight micro-batches."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from nemo_kto.architecture.stages import PipelineSplit, SplitError
from nemo_kto.models.gpt import pipeline_settings
from tests.helpers.messages import Message

SPLITS = [
    (4, PipelineSplit()),
    (8, PipelineSplit(stages=4)),
    (12, PipelineSplit(stages=2, chunks=3)),
    (5, PipelineSplit(stages=2, first=3)),
    (5, PipelineSplit(stages=2, first=3, last=2)),
    (11, PipelineSplit(stages=4, first=2, last=3)),
    (11, PipelineSplit(stages=4, last=2)),
    (14, PipelineSplit(stages=4, chunks=2, first=2, last=4)),
    (6, PipelineSplit(stages=4, counts_embedding=True, counts_loss=True)),
    (7, PipelineSplit(stages=2, chunks=2, counts_embedding=True)),
    (6, PipelineSplit(stages=4, chunks=2, counts_embedding=True, counts_loss=True)),
]


@pytest.mark.parametrize(("layers", "split"), SPLITS, ids=str)
def test_layers_of_a_stage_equal_megatron_core(layers: int, split: PipelineSplit) -> None:
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32, **pipeline_settings(split)
    )
    layers_of_stages = split.layers(layers)
    assert sorted(layer for stage in layers_of_stages for chunk in stage for layer in chunk) == list(range(layers))
    for stage, chunks in enumerate(layers_of_stages):
        for number, its_layers in enumerate(chunks):
            place = {"vp_stage": number if split.chunks > 1 else None, "pp_rank": stage}
            assert len(its_layers) == get_num_layers_to_build(config, **place)
            assert its_layers.start == get_transformer_layer_offset(config, **place)


@pytest.mark.parametrize(
    ("layers", "split", "expected"),
    [
        (5, PipelineSplit(stages=2), Message("5", "2")),
        (5, PipelineSplit(chunks=2), Message("2", "1")),
        (8, PipelineSplit(stages=2, first=4, counts_loss=True), Message("first", "4")),
    ],
)
def test_layers_that_cannot_be_divided(layers: int, split: PipelineSplit, expected: str) -> None:
    assert not split.fits(layers)
    with pytest.raises(SplitError) as error:
        split.layers(layers)
    assert str(error.value) == expected


def test_in_flight_micro_batches_of_1f1b() -> None:
    split = PipelineSplit(stages=4)
    assert [split.most_kept(stage, 100, [1.5]) for stage in range(4)] == [6.0, 4.5, 3.0, 1.5]
    assert [split.most_kept(stage, 2, [1.0]) for stage in range(4)] == [2, 2, 2, 1]
    assert PipelineSplit().most_kept(0, 9, [7.0]) == 7


def test_in_flight_micro_batches_of_the_interleaved_schedule() -> None:
    """Narayanan et al. 2021 and megatron-core: 2 (p - s - 1) + (v - 1) p passes come first, and one more is begun."""
    split = PipelineSplit(stages=4, chunks=2)
    assert [split.most_kept(stage, 100, [1, 1]) for stage in range(4)] == [11, 9, 7, 5]
    assert [split.most_kept(stage, 100, [0, 1]) for stage in range(4)] == [4, 4, 3, 1]
    assert [split.most_kept(stage, 4, [1, 1]) for stage in range(4)] == [8, 8, 7, 5]
    assert PipelineSplit(stages=2, chunks=3).most_kept(0, 8, [1, 1, 1]) == 7


def test_the_bubble_is_divided_by_the_number_of_chunks() -> None:
    assert PipelineSplit().bubble(8) == 0
    assert PipelineSplit(stages=4).bubble(8) == 3 / 11
    assert PipelineSplit(stages=4, chunks=2).bubble(8) == 3 / 19
    assert PipelineSplit(stages=4, chunks=2).bubble(5) == 3 / 19, "three of the eight are empty"
