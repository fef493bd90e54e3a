"""Console output of Python's logging, by rank; importing the package configures nothing."""

from __future__ import annotations

import io
import logging
import warnings

import pytest

from nemo_kto.telemetry.console import set_up_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def say_all(stream: io.StringIO, *, rank: int) -> list[str]:
    """The lines of a rank that prints everything, with logging set up twice."""
    for _ in range(2):
        set_up_logging(rank=rank, stream=stream)
    for name in ("nemo_kto.run.train", "nemo_kto.data.batches.dataset", "some_library"):
        logger = logging.getLogger(name)
        logger.info("%s tells", name)
        logger.warning("%s warns", name)
        logger.warning("%s warns", name)
    logging.getLogger("nemo_kto.data.batches.dataset").error("broken")
    with warnings.catch_warnings():
        warnings.simplefilter("always", FutureWarning)
        warnings.warn_explicit("old", FutureWarning, "library.py", 7)
    return stream.getvalue().splitlines()


def test_rank_zero_logs_and_warns() -> None:
    assert say_all(io.StringIO(), rank=0) == [
        "nemo_kto.run.train tells",
        "warning: nemo_kto.run.train warns",
        "nemo_kto.data.batches.dataset tells",
        "warning: nemo_kto.data.batches.dataset warns",
        "warning: some_library warns",
        "error: broken",
        "warning: old (FutureWarning, library.py:7)",
    ]


def test_other_ranks_log_only_their_warnings() -> None:
    assert say_all(io.StringIO(), rank=3) == [
        "warning on rank 3: nemo_kto.run.train warns",
        "warning on rank 3: some_library warns",
        "error on rank 3: broken",
        "warning on rank 3: old (FutureWarning, library.py:7)",
    ]


def test_colour_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[33mwarning:\x1b[0m some_library warns" in say_all(Terminal(), rank=0)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "warning: some_library warns" in say_all(Terminal(), rank=0)
