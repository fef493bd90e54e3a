"""Row counts in the start table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.architecture.config_file import read_config_file
from nemo_kto.data.batches.dataset import SplitCounts
from nemo_kto.data.batches.splits import Splits
from nemo_kto.run.data import split_text
from nemo_kto.run.summary import balance_line, row_lines
from tests.helpers.published_configs import published, write


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


# router_aux_loss_coef of published files, each with output_router_logits=false, or with neither
PUBLISHED = {
    "mistralai--Mixtral-8x22B-v0.1": 0.001, "Qwen--Qwen3.5-122B-A10B": 0.001, "ibm-granite--granite-4.0-h-tiny": 0.0001,
    "openai--gpt-oss-20b": 0.9, "Qwen--Qwen3-Coder-480B-A35B-Instruct": 0, "deepseek-ai--DeepSeek-V3": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_coefficient_that_is_not_used_is_in_the_table(name: str, tmp_path: Path) -> None:
    config, _ = read_config_file(write(published(name), tmp_path))
    unused = PUBLISHED[name]
    rest = f"; router_aux_loss_coef={unused:g} of config.json, for another loss, is not used)" if unused else ")"
    assert balance_line(0.0, config)["experts"] == f"no load-balancing loss (model.moe_aux_loss_coeff=0{rest}"
    assert balance_line(0.01, config)["experts"] == f"load-balancing loss (model.moe_aux_loss_coeff=0.01{rest}"
