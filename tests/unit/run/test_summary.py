"""Row counts in the start table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemo_kto.data.batches.dataset import SplitCounts, Splits
from nemo_kto.run.rows import split_text
from nemo_kto.run.summary import balance_line, row_lines


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, "5 pairs, 70 tokens, none truncated"),
        ({"cut_prompts": 2, "cut_responses": 1}, "5 pairs, 70 tokens, 2 prompts and 1 responses truncated"),
        ({"cut_responses": 3}, "5 pairs, 70 tokens, 3 responses truncated"),
        (
            {"rows": 12_000, "desirable": 7_000, "tokens": 3_400_000, "cut_prompts": 12},
            "12,000 pairs (7,000 desirable, 5,000 undesirable), 3,400,000 tokens, 12 prompts truncated",
        ),
    ],
)
def test_rows_of_a_split(counts: dict[str, Any], text: str) -> None:
    plain: dict[str, Any] = {"rows": 5, "desirable": None, "tokens": 70, "longest": 9, "cut_prompts": 0, "cut_responses": 0}
    assert split_text("pairs", SplitCounts(**plain | counts)) == text


def test_rows_that_are_left_out_are_in_the_table() -> None:
    nothing: Splits[Any] = Splits(train=None, validation={}, test=None)
    assert row_lines(nothing) == {}
    splits = replace(nothing, labels="l", left_out="3 rows without a label", special_tokens="of 2 rows")
    assert row_lines(splits) == {"labels": "l", "left out": "3 rows without a label", "special tokens": "of 2 rows"}


# router_aux_loss_coef of published models, each with output_router_logits=false; DeepSeek-V3 has none
PUBLISHED = {"Mixtral-8x22B-v0.1": 0.001, "Qwen3-30B-A3B": 0.001, "granite-4.0-h-tiny": 0.0001, "gpt-oss-20b": 0.9}
OFF = {"Qwen3-Coder-480B-A35B": {"router_aux_loss_coef": 0.0}, "DeepSeek-V3": {}, "granite": {"router_aux_loss_coef": None}}


@pytest.mark.parametrize("unused", PUBLISHED.values(), ids=PUBLISHED)
def test_a_coefficient_that_is_not_used_is_in_the_table(unused: float) -> None:
    config = {"router_aux_loss_coef": unused, "output_router_logits": False}
    rest = f"; router_aux_loss_coef={unused:g} of config.json, for another loss, is not used)"
    assert balance_line(0.0, config)["experts"] == f"no load-balancing loss (model.moe_aux_loss_coeff=0{rest}"
    assert balance_line(0.01, config)["experts"] == f"load-balancing loss (model.moe_aux_loss_coeff=0.01{rest}"


@pytest.mark.parametrize("config", OFF.values(), ids=OFF)
def test_models_without_a_coefficient(config: dict[str, Any]) -> None:
    assert balance_line(0.0, config)["experts"] == "no load-balancing loss (model.moe_aux_loss_coeff=0)"
