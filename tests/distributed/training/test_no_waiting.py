"""Between micro-batches the host does not wait for the device: it reads no values and uploads nothing.

There is no device here: every operation within megatron-core's schedule that would wait for one is counted.
tests/gpu/test_no_waiting.py lets torch refuse them on a GPU.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train

# They return a value to the host, or a tensor whose size is a value.
ASKING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim")


class Asked(TorchDispatchMode):
    """Counts operations whose result the host needs, masks as an index among them."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        is_mask = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        self.found[name] += is_mask or name in ASKING
        return function(*args, **(kwargs or {}))


class Moved(TorchFunctionMode):
    """Counts calls that move a tensor to another device, or to numpy, whether or not it is there already."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        targets = (*args[1:], *(kwargs or {}).values())
        to_a_device = name == "to" and any(isinstance(each, torch.device | str | torch.Tensor) for each in targets)
        self.found[name] += to_a_device or name in ("cpu", "cuda", "numpy", "tolist")
        return function(*args, **(kwargs or {}))


def waits(model: Path, rows: Path, folder: Path, algorithm: str, overrides: list[str]) -> list[dict[str, int]]:
    """On a rank: of each run of megatron-core's schedule in one step, the passes without gradient first."""
    from nemo_kto.models.engine import engine

    original, found = engine.get_forward_backward_func, []

    def watched() -> Any:
        schedule = original()

        def call(**arguments: Any) -> Any:
            counts: Counter[str] = Counter()
            with Asked(counts), Moved(counts):
                result = schedule(**arguments)
            found.append({name: count for name, count in counts.items() if count})
            return result

        return call

    engine.get_forward_backward_func = watched  # type: ignore[assignment]
    once = [f"trainer.{algorithm}.max_steps=1", f"trainer.{algorithm}.limit_val_batches=0"]
    try:
        train(model, rows, folder, 1, [*once, *overrides], algorithm)
    finally:
        engine.get_forward_backward_func = original
    return found


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("kto", ["model.kto.preference_average_log_probs=true", "model.kto.sft_loss_weight=0.1"]),
        ("dpo", ["model.dpo.preference_loss=rpo_sq", "model.dpo.sft_loss_weight=0.1"]),
    ],
    ids=["kto", "dpo"],
)
def test_no_micro_batch_waits_for_the_device(
    algorithm: str, overrides: list[str], ranks: RankPool, tiny_llama: Path, kto_rows: Path, dpo_rows: Path, tmp_path: Path
) -> None:
    rows = kto_rows if algorithm == "kto" else dpo_rows
    (found,) = ranks.run(1, waits, tiny_llama, rows, tmp_path, algorithm, [*overrides, "model.micro_batch_size=2"])
    assert len(found) > 1
    # the first pass brings the frequencies of the rotary embedding to the device, the last one divides by the examples
    assert all(not of_a_pass for of_a_pass in found[1:-1]), found
    assert sum(sum(of_a_pass.values()) for of_a_pass in found) <= 2, "fewer than the eight micro-batches of a pass"
