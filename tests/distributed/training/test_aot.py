"""AOT sorts the valid pairs of the global batch, for any number of pairs per data-parallel rank."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_kto.losses.preference import rank_partners
from tests.helpers.rank_pool import RankPool

SIZES = (3, 1)  # pairs of each rank
VALID = [True, False, True, True]


def log_ratios() -> tuple[torch.Tensor, torch.Tensor]:
    """Of the chosen and of the rejected answers of all pairs; the greatest and the least are those of an invalid pair."""
    return torch.tensor([0.5, 90.0, -1.0, 2.0]), torch.tensor([1.5, -90.0, 3.0, 0.25])


def partners_here() -> dict[str, torch.Tensor]:
    """On a rank: what its pairs are compared with, where the policy says :func:`log_ratios`."""
    from nemo_kto.distributed import state
    from nemo_kto.losses.preference import LOSSES
    from nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel

    state.init_distributed(layout=state.Layout(), seed=0)
    rank = state.rank()
    first, second = (values.split(SIZES)[rank] for values in log_ratios())
    valid = torch.tensor(VALID).split(SIZES)[rank]
    reference_and_valid = {
        "reference_logps_B": torch.zeros(2 * len(first)),
        "valid_B": torch.cat([torch.ones_like(valid), valid]),  # a pair whose rejected answer has no token
    }
    model: Any = SimpleNamespace(
        objective=SimpleNamespace(loss=LOSSES["aot_unpaired"]),
        engine=SimpleNamespace(logprobs=lambda _: torch.cat([first, second])),
        phase=lambda _: contextlib.nullcontext(),
    )
    model._compared = MegatronGPTDPOModel._compared
    answers: Any = None
    partners = MegatronGPTDPOModel._rank_partners(model, answers, reference_and_valid)
    state.destroy()
    return partners


def test_ranks_with_unequal_numbers_of_pairs_and_an_invalid_pair(ranks: RankPool) -> None:
    results = ranks.run(2, partners_here)
    valid = torch.tensor(VALID)
    expected = rank_partners(*(values[valid] for values in log_ratios()))
    for name, partners in zip(("first_partners_P", "second_partners_P"), expected, strict=True):
        assert [len(result[name]) for result in results] == list(SIZES)
        got = torch.cat([result[name] for result in results])[valid]
        assert got.tolist() == pytest.approx(partners.tolist())
