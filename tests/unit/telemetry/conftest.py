"""Weights & Biases without what another test left in its process and in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of wandb, and no settings that it remembers, such as whether it is offline; also afterwards."""
    import wandb

    for name in {"WANDB_MODE", *(name for name in os.environ if name.startswith("WANDB_"))}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()
