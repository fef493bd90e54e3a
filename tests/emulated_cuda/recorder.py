"""A callback that records the waits of the host in each step on emulated devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.distributed import state
from tests.emulated_cuda import waits


class RecordWaits(Callback):
    """Writes FILE, on the first rank: JSON, of each training step a list of waits [kind, site, in_micro_batch, count]."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.steps: list[list[tuple[str, str, bool, int]]] = []

    def on_fit_start(self, trainer: Any) -> None:
        waits.counted.clear()

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        self.steps.append([(*wait, count) for wait, count in waits.counted.most_common()])
        waits.counted.clear()
        if state.is_rank_zero():
            self.file.write_text(json.dumps(self.steps, indent=1))
