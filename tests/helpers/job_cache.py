"""Training runs that several tests inspect; each is made once a session, by the worker that asks for it first."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train

# Three steps with a checkpoint after each; a resumed run goes on in the middle of an epoch and over its end.
CHECKPOINTS = (
    *("trainer.kto.max_steps=3", "trainer.kto.limit_train_batches=2", "trainer.kto.save_interval=1"),
    *("trainer.kto.limit_val_batches=0", "exp_manager.checkpoint_callback_params.save_top_k=-1"),
)
FINISHED = "finished"  # written next to the run folder when the job is done


class JobCache:
    """Runs ``train`` with a tiny model for each new combination of arguments, and returns the folder of the run.

    Tests of all files and workers share the folders: a test that changes one must copy it first.
    """

    def __init__(self, ranks: RankPool, folder: Path, *, models: Callable[..., Path], rows: Mapping[str, Path]) -> None:
        self._ranks, self._folder = ranks, folder
        self._models, self._rows = models, rows  # family -> Hugging Face folder; algorithm -> rows

    def __call__(self, algorithm: str = "kto", *, run: Callable[..., None] = train, **options: Any) -> Path:
        """Return the folder of the finished run; ``options`` are those of :meth:`start`."""
        key = json.dumps([algorithm, run.__name__, sorted(options.items())])
        job = self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        with _locked(job.with_suffix(".lock")):
            if not (job / FINISHED).exists():
                self.start(job / "run", algorithm, run=run, **options)
                (job / FINISHED).touch()
        return job / "run"

    def start(
        self,
        folder: Path,
        algorithm: str = "kto",
        *,
        overrides: Sequence[str] = (),
        world_size: int = 1,
        family: str = "llama",
        layers: int = 2,
        run: Callable[..., None] = train,
    ) -> Path:
        """Run ``train``, or another function with its arguments, into this folder, which may hold a part of a run."""
        folder.mkdir(parents=True, exist_ok=True)
        model = self._models(family, num_hidden_layers=layers)
        arguments = (model, self._rows[algorithm], folder, world_size, [*overrides], algorithm)
        self._ranks.run(world_size, run, *arguments)
        return folder


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # released when the file is closed
        yield
