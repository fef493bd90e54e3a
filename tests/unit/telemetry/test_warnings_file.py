"""The warnings of a run in its folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from nemo_kto.telemetry.loggers import WARNINGS_FILE, collect_warnings

logger = logging.getLogger("nemo_kto.somewhere")


def lines(folder: Path) -> list[tuple[int, str, str]]:
    content = map(json.loads, (folder / WARNINGS_FILE).read_text().splitlines())
    return [(line["step"], line["level"], line["text"]) for line in content]


def test_warnings_are_written_with_their_step(tmp_path: Path) -> None:
    step = 0
    with collect_warnings() as warnings:
        logger.warning("before the folder is known")
        assert not list(tmp_path.iterdir())
        warnings.open_file(tmp_path, step=lambda: step, resumed_step=None)
        logger.info("no warning")
        step = 7
        for _ in range(2):
            logger.warning("loss of %.1f and https://me:password@host", 3.5)
        logging.getLogger("library").error("failed")
    logger.warning("after the run")
    assert lines(tmp_path) == [
        (0, "warning", "before the folder is known"),
        (7, "warning", "loss of 3.5 and https://***@host"),
        (7, "error", "failed"),
    ]


def test_a_resumed_run_drops_the_warnings_of_repeated_steps(tmp_path: Path) -> None:
    for resumed_step, at in ((None, 4), (None, 9), (5, 6)):
        with collect_warnings() as warnings:
            warnings.open_file(tmp_path, step=lambda at=at: at, resumed_step=resumed_step)  # type: ignore[misc]
            logger.warning("at step %s", at)
    assert lines(tmp_path) == [(6, "warning", "at step 6")]
