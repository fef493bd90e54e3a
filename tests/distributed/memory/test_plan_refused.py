"""A run that cannot fit ends on every rank before its rows are read and its model is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train


def error_with_memory(memory: int, model: Path, rows: Path, folder: Path) -> str:
    """Error of a run on a machine with this many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_kto.device.device.host_memory_bytes", lambda: memory)
        with pytest.raises(UserError) as error:
            train(model, rows, folder, 2, ["trainer.kto.max_steps=1", "model.reference.mode=cached"])
    return str(error.value)


def test_ranks_share_host_memory(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    number = 2 * 259 * 64 + 2 * (36_864 + 2 * 64) + 64  # both tables, two layers with two norms, and the last norm
    # fp32: 4 of weights, 4 of gradients, 8 / 2 of moments, which the two data-parallel ranks share out, and 4 of the policy
    # on the host while the reference is evaluated for a later epoch
    need = 16 * number
    refusals = ranks.run(2, error_with_memory, 2 * need - 2, tiny_llama, kto_rows, tmp_path)
    assert refusals == [Message("1.7 MB", "2 ranks", "nemo-kto plan kto")] * 2
    assert [*tmp_path.glob("*.jsonl")] == [], "nothing was started"
