"""A model in training with its checkpoints, for tests of resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from nemo_kto.checkpoint.manager import CheckpointManager, newest_checkpoint
from tests.helpers import lora_jobs


class SavedRun:
    """Operations of tests on a run with any optimizer."""

    def __init__(self, model: Path, folder: Path, chunks: list[Any], optimizer: Any) -> None:
        self.chunks, self.optimizer, self.folder = chunks, optimizer, folder
        self.manager: CheckpointManager = lora_jobs.manager_of(chunks, optimizer, folder, model)

    def steps(self, count: int) -> list[float]:
        """The norm of the gradient of each."""
        norms = []
        for _ in range(count):
            lora_jobs.backward(self.chunks)
            self.manager.scheduler.step(1)
            norms.append(float(self.optimizer.step()[1]))
        return norms

    def load(self) -> None:
        newest = newest_checkpoint(self.folder)
        assert newest is not None
        self.manager.load(newest)

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in unwrap_model(self.chunks[0]).parameters()]
