"""A callback that records, for each step on emulated devices, the waits of the host and its other work for the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.distributed import state
from tests.emulated_cuda import host_work, waits


class RecordWaits(Callback):
    """Writes FILE, on the first rank: JSON, of each training step a list of waits [kind, site, in_micro_batch, count].

    FILE with the suffix ``.work`` gets the same of copies to the device and of probes, and the number of launches in
    micro-batches and outside of them.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.steps: list[list[tuple[str, str, bool, int]]] = []
        self.work: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Any) -> None:
        host_work.watch_probes()
        self._clear()

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        self.steps.append([(*wait, count) for wait, count in waits.counted.most_common()])
        work = [(*each, count) for each, count in host_work.counted.most_common()]
        self.work.append({"launches": [host_work.launches[True], host_work.launches[False]], "others": work})
        self._clear()
        if state.is_rank_zero():
            self.file.write_text(json.dumps(self.steps, indent=1))
            self.file.with_suffix(".work").write_text(json.dumps(self.work, indent=1))

    @staticmethod
    def _clear() -> None:
        for counter in (waits.counted, host_work.counted, host_work.launches):
            counter.clear()
