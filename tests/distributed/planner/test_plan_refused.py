"""A run that cannot fit ends on every rank before its rows are read and its model is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train


def with_little_memory(model: Path, rows: Path, folder: Path, memory: int) -> str:
    """The error of a run on a machine with this many bytes; the warnings about memory if there is none."""
    import logging

    from nemo_kto.errors import UserError

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nemo_kto.run.build").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_kto.device.device.host_memory_bytes", lambda: memory)
        try:
            overrides = ["trainer.kto.max_steps=1", "model.reference.mode=cached"]
            train(model, rows, folder, 2, overrides)
        except UserError as error:
            return str(error)
        finally:
            logging.getLogger("nemo_kto.run.build").removeHandler(handler)
    return "\n".join(text for text in warnings if "memory" in text or "may need" in text)


def test_ranks_share_host_memory(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    number = 2 * 259 * 64 + 4 * (36_864 + 2 * 64) + 64  # both tables, four layers with two norms, and the last norm
    # fp32: 4 of weights, 4 of gradients, 8 / 2 of moments, which the two data-parallel ranks share out, and 4 of the policy
    # on the host while the reference is evaluated for a later epoch
    need = 16 * number
    refusals = ranks.run(2, with_little_memory, tiny_llama, kto_rows, tmp_path / "refused", 2 * need - 2)
    assert refusals == [Message("2.9 MB", "2 ranks", "nemo-kto plan kto")] * 2
    assert [*(tmp_path / "refused").glob("*.jsonl")] == [], "nothing was started"
    warned, nothing = ranks.run(2, with_little_memory, tiny_llama, kto_rows, tmp_path / "ran", 2 * need)
    assert warned == Message("2.9 MB", "longest sequences", "2 ranks"), "for the lengths of the rows, by rank 0"
    assert nothing == ""
