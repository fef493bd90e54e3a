"""A tiny model, prompts, and answers as `nemo-kto sample` writes them."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import make_checkpoint, write_rows

PROMPTS: list[dict[str, Any]] = [{"prompt": "What is a lake?"}, {"messages": [{"role": "user", "content": "And a\nriver?"}]}]
ANSWERS = ("Water.", "A lake is a large body of water.", "Why?", "No idea.")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def full_disk(file: Path, *, room: int) -> Iterator[None]:
    """No file may have more than so many bytes above the size of this one; the kernel writes the part that fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_and_kill(run: Callable[..., None], *words: object, writes: int) -> None:
    """Run in another process, which is killed after so many writes to its file."""

    def counted() -> None:
        write, numbers = os.fsync, itertools.count(1)

        def fsync(fd: Any) -> None:
            write(fd)
            if next(numbers) == writes:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync  # in this process only
        run(*words)

    process = multiprocessing.get_context("fork").Process(target=counted)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
    }
    return make_checkpoint(tmp_path_factory.mktemp("models") / "small", "llama", **sizes)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture
def answers_file(tmp_path: Path) -> Callable[..., Path]:
    """``answers_file(*texts)``: a file with these answers to each of two prompts."""

    def write(*texts: str) -> Path:
        rows = [
            {"prompt": [{"role": "user", "content": text}], "answer": answer, "model": "m", "line": line, "index": index}
            for line, text in enumerate(("What is a lake?", "And a\nriver?"), start=1)
            for index, answer in enumerate(texts or ANSWERS)
        ]
        return write_rows(tmp_path / "answers.jsonl", rows)

    return write
