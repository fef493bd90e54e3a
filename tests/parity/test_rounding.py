"""Rounding errors of gradients, against fp64, compared with those of transformers over ten models of random weights.

A norm enlarges the rounding of outputs near zero, which gated delta nets have at single tokens, so that the errors of two
programs may differ by a factor of ten for one model, in either direction.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_kto.distributed.state import Layout
from tests.families import GRADIENTS
from tests.helpers import hf_jobs, hf_models
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.parity
SEEDS = 10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUICK = [("qwen3_next", "fp32"), ("qwen3_next", "bf16")]
CASES = [(family, name) for family in ("qwen3_5", "granite_hybrid", "nemotron_h", "deepseek_v3") for name in DTYPES]


@contextlib.contextmanager
def everything_in_fp64() -> Any:
    """Lets transformers compute in fp64 where it asks for fp32, such as in norms and delta rules."""
    wide = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with wide, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def their_gradients(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    narrow = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=narrow, attn_implementation="eager").to(dtype)
    with everything_in_fp64() if dtype == torch.float64 else contextlib.nullcontext():
        (model(hf_models.tokens()).logits * hf_models.cotangent()).sum().backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all gradients, relative to the norm of the exact ones."""
    assert found.keys() == exact.keys()
    squares = [((found[name].double() - value).square().sum(), value.square().sum()) for name, value in exact.items()]
    return math.sqrt(sum(square for square, _ in squares) / sum(total for _, total in squares))


@pytest.mark.parametrize(("family", "dtype"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in CASES)])
def test_gradients_are_as_exact_as_those_of_transformers(family: str, dtype: str, ranks: Any, tmp_path: Path) -> None:
    step = GRADIENTS[family]
    stored = "bfloat16" if dtype == "bf16" else "float32"
    folders = {
        f"{seed}": make_checkpoint(tmp_path / f"{seed}", step.family, seed=seed, dtype=stored, **step.changes)
        for seed in range(SEEDS)
    }
    ranks.run(1, hf_jobs.check_gradients, Layout(), folders, tmp_path / "ours", DTYPES[dtype])
    ratios = []
    for seed, folder in folders.items():
        exact = their_gradients(folder, torch.float64)
        found = {
            each.replace("backbone.", "model."): value for each, value in hf_models.weights(tmp_path / "ours" / seed).items()
        }
        ratios.append(error(found, exact) / error(their_gradients(folder, DTYPES[dtype]), exact))
    assert statistics.geometric_mean(ratios) < 1.5, ratios
