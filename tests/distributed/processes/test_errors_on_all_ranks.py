"""An error of one rank is raised on all ranks with the same message."""

from __future__ import annotations

from nemo_kto.errors import UserError
from tests.helpers.hf_jobs import message_of
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool


def fail_on_rank(culprit: int) -> list[str]:
    """Errors on this rank for each kind of joint failure, caused by rank ``culprit``."""
    from nemo_kto.distributed import state

    state.init_distributed(layout=state.Layout(), seed=0)

    def break_here() -> None:
        raise OSError(f"disk of rank {state.rank()} is full")

    def raise_together() -> None:
        state.raise_together(state.attempt(break_here) if state.rank() == culprit else None, "not written: {}")

    def main_process_first() -> None:
        with state.main_process_first(doing="at work"):
            break_here()

    def refuse() -> None:
        raise UserError("rows are broken; correct them")

    def refuse_first() -> None:
        with state.main_process_first(doing="at work"):
            refuse()

    return [
        message_of(action)
        for action in (
            raise_together,
            lambda: state.on_rank_zero(break_here, "no folder: {}"),
            lambda: state.on_rank_zero(lambda: None, "no folder: {}"),
            lambda: state.on_rank_zero(refuse, "no export: {}"),
            refuse_first,
            lambda: state.from_rank_zero(refuse, doing="at work"),
            main_process_first,
            lambda: state.from_rank_zero(break_here, doing="at work"),
        )
    ] + [state.from_rank_zero(lambda: f"message by rank {state.rank()}", doing="at work")]


def test_every_rank_gets_the_error(ranks: RankPool) -> None:
    first, second = ranks.run(2, fail_on_rank, 1)
    together = [
        "RuntimeError: not written: OSError: disk of rank 1 is full",
        "RuntimeError: no folder: OSError: disk of rank 0 is full",
        "",
        "UserError: no export: rows are broken; correct them",
        "UserError: rows are broken; correct them",
        "UserError: rows are broken; correct them",
    ]
    own, message = "OSError: disk of rank 0 is full", "message by rank 0"
    assert first == [*together, own, own, message]
    waited = Message("RuntimeError", "OSError: disk of rank 0")
    assert second == [*together, waited, waited, message]
