"""Callbacks of the jobs of these tests: record the model, hashes of weights, and waits; stop after a step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.distributed import state

_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


class RecordModel(Callback):
    """Writes FILE: the kind of device, the dtype, and the classes of the layers of the model that trains."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_fit_start(self, trainer: Any) -> None:
        if not state.is_rank_zero():
            return
        weights = list(trainer.model.engine.chunks[0].parameters())
        record = {
            "devices": sorted({weight.device.type for weight in weights}),
            "dtypes": sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}),
            "backend": torch.distributed.get_backend(),
            "classes": sorted({type(part).__name__ for part in trainer.model.engine.chunks[0].modules()}),
            # when the layers were built, and what Transformer Engine's then read
            "deterministic": [str(trainer.model.engine.chunks[0].config.deterministic_mode), os.environ.get(_ENGINE, "")],
        }
        self.file.write_text(json.dumps(record))


class RecordHashes(Callback):
    """Adds to FILE, a line for each, hashes of weights and optimizer state: at the start, and after each step."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_fit_start(self, trainer: Any) -> None:
        self._record(trainer, "start")

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        self._record(trainer, "end")

    def _record(self, trainer: Any, when: str) -> None:
        weights = [weight for chunk in trainer.model.engine.chunks for weight in chunk.parameters()]
        adams = [part.optimizer for part in trainer.optimizer.chained_optimizers]
        mains = [main for adam in adams for group in adam.param_groups for main in group["params"]]
        moments = [
            each
            for adam in adams
            for kept in adam.state.values()
            for _, each in sorted(kept.items())
            if torch.is_tensor(each)
        ]
        record = {
            "weights": _hash(weights),
            "main weights": _hash(mains),
            "moments": _hash(moments),
            "tensors": len(moments),
        }
        with self.file.open("a") as file:
            file.write(json.dumps({"step": trainer.step, "when": when, **record}) + "\n")


def _hash(tensors: Sequence[torch.Tensor]) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


class StopAfter(Callback):
    """Asks the run to stop after STEP, as a scheduler would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        if event.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class RecordWaits(Callback):
    """Writes FILE: for each step, where the host waited for the GPU, one text for each wait.

    Waits within operators are torch's warnings; explicit waits are recorded by wrapped functions.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.steps: list[list[str]] = []
        self._waits: list[str] = []

    def on_fit_start(self, trainer: Any) -> None:
        owners: tuple[Any, ...] = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
        for owner in owners:
            owner.synchronize = self._recorded(owner.synchronize, owner.__name__)
        shown = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *options: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self._waits.append(f"{filename}:{lineno}")
            else:
                shown(message, category, filename, lineno, *options)

        warnings.showwarning = note  # type: ignore[assignment]
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
        torch.cuda.set_sync_debug_mode("warn")

    def _recorded(self, wait: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._waits.append(name)
            return wait(*arguments)

        return call

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        self.steps.append(self._waits)
        self._waits = []
        self.file.write_text(json.dumps(self.steps, indent=1))
