"""Changed checkpoint files with correct hashes: one error that names the file, without traceback or hang."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from nemo_kto.checkpoint.manager import newest_checkpoint
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import hash_file, info_text
from tests.helpers import lora_jobs
from tests.helpers.messages import assert_names
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun

STEP, SECONDS = "step_000002", 20
COMMON, METADATA, BACKENDS, RNG = "state/common.pt", "state/.metadata", "state/metadata.json", "rng/00000.pt"
NAN = float("nan")
NO_FILE = "no file"
Damage = Callable[[Path], object]


def content(file: str, raw: bytes) -> Damage:
    return lambda checkpoint: (checkpoint / file).write_bytes(raw)


def pipe(file: str) -> Damage:
    """A FIFO that trainer.json does not list."""

    def apply(checkpoint: Path) -> None:
        (checkpoint / file).unlink()
        os.mkfifo(checkpoint / file)

    return apply


def saved(file: str, *way: str, value: Any = None, absent: bool = False) -> Damage:
    """Change or remove a value in a file of torch.save."""

    def apply(checkpoint: Path) -> None:
        loaded = torch.load(checkpoint / file, weights_only=False)
        *outer, last = way
        inner = loaded
        for name in outer:
            inner = inner[name]
        if absent:
            del inner[last]
        else:
            inner[last] = value
        torch.save(loaded, checkpoint / file)

    return apply


def metadata(change: Callable[[Any], object]) -> Damage:
    def apply(checkpoint: Path) -> None:
        loaded = FileSystemReader(checkpoint / "state").read_metadata()
        change(loaded)
        (checkpoint / METADATA).write_bytes(pickle.dumps(loaded))

    return apply


def first_shard(change: Callable[[Path], object]) -> Damage:
    return lambda checkpoint: change(sorted((checkpoint / "state").glob("*.distcp"))[0])


def saves_a_list(file: str) -> Damage:
    return lambda checkpoint: torch.save([1], checkpoint / file)


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


class Evil:
    """A pickle of it creates a folder when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("ran",)


def lead_out(loaded: Any) -> None:
    """The metadata refers to files in the folder above, and back."""
    for index, info in loaded.storage_data.items():
        loaded.storage_data[index] = replace(info, relative_path=f"../state/{info.relative_path}")


# The damage, and the words of the error besides the checkpoint.
CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    **{f"{file} is garbage": (content(file, b"\x81\x02garbage"), (file,)) for file in (COMMON, METADATA, BACKENDS, RNG)},
    **{f"{file} is a pipe": (pipe(file), (file,)) for file in (COMMON, METADATA, BACKENDS, RNG)},
    **{f"{file} is a list": (saves_a_list(file), ()) for file in (COMMON, RNG)},
    "backends nest": (content(BACKENDS, b"[" * 99_999), (BACKENDS,)),
    "another format": (content(BACKENDS, b'{"sharded_backend": "zarr"}'), (BACKENDS, "torch_dist")),
    "a common state that runs code": (lambda checkpoint: torch.save([Evil()], checkpoint / COMMON), (COMMON, "posix.mkdir")),
    "shards elsewhere": (metadata(lead_out), (METADATA, "../state/")),
    "a schedule with NaN": (saved(COMMON, "scheduler", "max_lr", value=NAN), ("state", "max_lr", "nan")),
    "a schedule of -1 steps": (saved(COMMON, "scheduler", "num_steps", value=-1), ("state", "num_steps", "-1")),
    "a schedule of many steps": (saved(COMMON, "scheduler", "num_steps", value=10**9), ("state", "num_steps", "1000000000")),
    "no schedule": (saved(COMMON, "scheduler", absent=True), ("state", "scheduler")),
    "Adam before its first step": (saved(COMMON, "adam_step", value=-1), ("state", "adam_step", "-1")),
    "no optimizer": (saved(COMMON, "optimizer", absent=True), ("state",)),
    "no generator of Python": (saved(RNG, "python", absent=True), (RNG, "python")),
    "a generator of numpy that nests": (saved(RNG, "numpy", value="[" * 99_999), (RNG,)),
    "a generator of torch of another size": (saved(RNG, "torch", value=torch.zeros(3, dtype=torch.uint8)), (RNG,)),
    "trackers of others": (saved(RNG, "tracker", value={"mine": 1}), (RNG, "tracker", "mine")),
    "metadata of no tensors": (metadata(lambda loaded: loaded.state_dict_metadata.clear()), ("state",)),
    "metadata whose places are None": (metadata(lambda loaded: setattr(loaded, "storage_data", None)), (METADATA,)),
    "a shard of zeros": (first_shard(zeros), ("state",)),
    "a shard that is a pipe": (first_shard(lambda file: (file.unlink(), os.mkfifo(file))), ("state", ".distcp", "pipe")),
    "a shard that is missing": (first_shard(Path.unlink), ("state", ".distcp")),
}


def tamper(checkpoint: Path, damage: Damage) -> None:
    """Damage it, and make its trainer.json agree."""
    damage(checkpoint)
    info = json.loads((checkpoint / "trainer.json").read_text())
    there = [name for name in info["files"] if (checkpoint / name).is_file()]
    info["files"] = {name: hash_file(checkpoint / name)._asdict() for name in there}
    (checkpoint / "trainer.json").write_text(info_text(info))


def load_all(model: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Type and text of the error of each case."""
    state.init_distributed(layout=state.Layout(), seed=3)
    chunks, _ = lora_jobs.build(model, state.Layout(), None, distributed=False)
    run = SavedRun(model, folder / "whole", chunks, lora_jobs.optimizer_of(chunks, distributed=False))
    run.steps(2)
    run.manager.save({"step": 2}, {})
    run.load()
    found = {}
    for number, (case, (damage, _)) in enumerate(CASES.items()):
        run.folder = folder / str(number)
        shutil.copytree(folder / "whole", run.folder)
        try:
            tamper(run.folder / STEP, damage)
        except FileNotFoundError as error:  # newer versions of megatron-core have no common.pt
            found[case] = (NO_FILE, str(error))
            continue
        signal.alarm(SECONDS)  # ends this rank where it hangs
        try:
            newest = newest_checkpoint(run.folder)
            assert newest is not None, "its files match its trainer.json"
            run.manager.load(newest)
            found[case] = ("", "")
        except BaseException as error:
            found[case] = (type(error).__name__, str(error))
        signal.alarm(0)
        shutil.rmtree(run.folder)
    return found


@pytest.fixture(scope="module")
def found(ranks: RankPool, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    (of_rank,) = ranks.run(1, load_all, tiny_llama, tmp_path_factory.mktemp("tampered"))
    return dict(of_rank)


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_file(case: str, found: dict[str, tuple[str, str]]) -> None:
    kind, text = found[case]
    if kind == NO_FILE:
        pytest.skip(f"this megatron-core does not write it: {text}")
    assert kind == UserError.__name__, text
    assert_names(text, STEP, *CASES[case][1], "; take another checkpoint", "nemo-kto checkpoint verify")
    assert len(text) < 1000
