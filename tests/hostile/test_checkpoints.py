"""Checkpoints whose pickles would run code when loaded: nothing runs, and the error names the file."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_kto.model_files.checkpoint_files import hash_file, info_text
from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import Message
from tests.helpers.tiny_models import make_rows, write_rows

RUN, STEP = "run", "run/checkpoints/step_000001"


class Evil:
    """A pickle of it creates the file ``marker`` when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch marker",)


def kto(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    words = ["model.data.data_prefix=rows.jsonl", "model.data.cache_dir=cache", "model.data.seq_length=64"]
    words += ["model.global_batch_size=4", "hardware=cpu", "trainer.kto.save_interval=1", "trainer.precision=32"]
    words += ["model.data.splits_string='100,0,0'", "export.enabled=false", "export.report=false"]
    words += ["exp_manager.samples.count=0", "exp_manager.create_tensorboard_logger=false"]
    return run([*CLI, "kto", *words, *given], cwd=folder, env=environment(), preload=TRAINING, timeout=300)


def exported(folder: Path) -> subprocess.CompletedProcess[str]:
    return run([*CLI, "export", STEP, "out"], cwd=folder, env=environment(), preload=TRAINING)


def resumed(folder: Path) -> subprocess.CompletedProcess[str]:
    return kto(
        folder,
        "pretrained_checkpoint.restore_from_path=model",
        f"exp_manager.explicit_log_dir={RUN}",
        "trainer.kto.max_steps=2",
    )


@pytest.fixture(scope="module")
def whole(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its rows, and a run of one step."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(tiny_llama, folder / "model")
    write_rows(folder / "rows.jsonl", make_rows(8))
    given = ("pretrained_checkpoint.restore_from_path=model", f"exp_manager.explicit_log_dir={RUN}")
    done = kto(folder, *given, "trainer.kto.max_steps=1")
    assert done.returncode == 0, done.stderr
    return folder


def evil_metadata(checkpoint: Path) -> None:
    (checkpoint / "state/.metadata").write_bytes(pickle.dumps(Evil()))


def evil_file(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: torch.save({"a": Evil()}, checkpoint / name)


def evil_tensors(checkpoint: Path) -> None:
    """All tensors that the metadata names lie in a file that is a pickle; there is nothing else."""
    state = checkpoint / "state"
    metadata = FileSystemReader(state).read_metadata()
    torch.save([Evil()], state / "evil.distcp")
    size = (state / "evil.distcp").stat().st_size
    for index, info in metadata.storage_data.items():
        assert isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata)
        metadata.storage_data[index] = replace(info, relative_path="evil.distcp", offset=0, length=size)
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


Command = Callable[[Path], subprocess.CompletedProcess[str]]
METADATA = Message("state/.metadata", "posix.system", "another")
SHARDS = Message("posix.system", "checkpoint")
CASES: dict[str, tuple[Command, Callable[[Path], None], Message]] = {
    "metadata at export": (exported, evil_metadata, METADATA),
    "generators at a resume": (resumed, evil_file("rng/00000.pt"), Message("rng/00000.pt", "posix.system", "take")),
    "tensors in shards at a resume": (resumed, evil_tensors, SHARDS),
}


@pytest.mark.parametrize("case", CASES)
def test_no_code_runs_and_the_error_names_the_file(case: str, whole: Path, tmp_path: Path) -> None:
    command, breaks, expected = CASES[case]
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    checkpoint = folder / STEP
    breaks(checkpoint)
    info = json.loads((checkpoint / "trainer.json").read_text())
    info["files"] = {name: hash_file(checkpoint / name)._asdict() for name in info["files"]}
    (checkpoint / "trainer.json").write_text(info_text(info))
    done = command(folder)
    assert not (folder / "marker").exists()
    assert done.returncode == 2, done.stderr
    _, *messages = re.split(r"nemo-kto(?: export)?: ", done.stderr)
    assert messages == [expected]
    assert f"{STEP}/" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()
