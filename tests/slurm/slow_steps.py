"""A callback for jobs that must reach their time limit."""

from __future__ import annotations

import os
import time

from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.algorithms.protocols import Trainer


class SlowFirstLife(Callback):
    """Makes each step slow until the job has been requeued."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        time.sleep(self.seconds)
