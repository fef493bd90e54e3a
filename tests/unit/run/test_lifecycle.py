"""Records of a run for its report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_kto.algorithms.recipes import KTO
from nemo_kto.config import compose
from nemo_kto.config.saved_config import settings_of_user
from nemo_kto.data.batches.dataset import LengthHistogram
from nemo_kto.run import lifecycle


def test_a_report_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").touch()

    def fail(*arguments: object) -> list[str]:
        raise ImportError("no such font")

    assert lifecycle.make_report(tmp_path, fail) == (None, ())
    (message,) = caplog.messages
    assert all(word in message for word in ("ImportError", "no such font", f"nemo-kto report {tmp_path}"))
    assert lifecycle.make_report(tmp_path, None) == (None, ())
    assert len(caplog.messages) == 1


def test_the_settings_of_the_user_are_those_that_differ_from_the_defaults() -> None:
    given = [
        "model.optim.lr=2e-5",
        "model.optim.betas=[0.9,0.95]",
        "model.optim.eps=1e-8",  # the default
        "model.data.data_prefix={train: a.jsonl, validation: b.jsonl}",
        "pretrained_checkpoint.restore_from_path=model",
        "trainer.kto.max_steps=5",
    ]
    cfg, mistakes = compose.to_config(compose.load(given, source=compose.our_source(KTO)))
    assert cfg is not None, mistakes
    assert settings_of_user(cfg) == {
        "trainer.kto.max_steps": 5,
        "pretrained_checkpoint.restore_from_path": "model",
        "model.optim.lr": 2e-5,
        "model.optim.betas": [0.9, 0.95],
        "model.data.data_prefix": {"train": "a.jsonl", "validation": "b.jsonl"},
    }


def test_length_histograms() -> None:
    one = LengthHistogram.of(np.array([0, 3, 3, 39]))
    assert (one.width, one.counts[0], one.counts[3], one.counts[39], one.last_is_open) == (1, 1, 2, 1, False)
    lengths = np.arange(1, 100_001)
    lengths[-1] = 10**7  # one of 100,000
    long = LengthHistogram.of(lengths)
    assert (long.width, len(long.counts), sum(long.counts), long.last_is_open) == (4096, 25, 100_000, True)
    assert long.counts[:2] == [4095, 4096]
    assert LengthHistogram.of(np.array([], dtype=np.int64)).counts == []
