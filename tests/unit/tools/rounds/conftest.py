"""A tiny model, prompts, answers as `nemo-kto sample` writes them, and the commands that read them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import resource
import signal
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.tools.rounds import compare_command, endpoint, label_command, sample_command
from tests.helpers.tiny_models import make_checkpoint, write_rows

_tls_context = functools.cache(ssl.create_default_context)  # reading its certificates takes longer than most tests
COMMANDS = {"sample": sample_command, "label": label_command, "compare": compare_command}
PROMPTS: list[dict[str, Any]] = [{"prompt": "What is a lake?"}, {"messages": [{"role": "user", "content": "And a\nriver?"}]}]
SCORES = "tests.unit.tools.rounds.scores"  # module of the functions
ANSWERS = ("Water.", "A lake is a large body of water.", "Why?", "No idea.")


def run(command: str, *words: object) -> None:
    """Run a command in this process; --out is out.jsonl by default."""
    COMMANDS[command].main([*map(str, words), *([] if "--out" in words else ["--out", "out.jsonl"])])


def answers(file: str, texts: Sequence[str], *, each: int = 2, prompt: str = "Question {}?", **last: object) -> str:
    """A file of answers of one model, ``each`` to a prompt; ``last``: columns of the last line."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": prompt.format(1 + number // each),
            "answer": text,
            "model": f"model of {file}",
            "line": 1 + number // each,
            "index": number % each,
        }
        for number, text in enumerate(texts)
    ]
    rows[-1].update(last)
    write_rows(Path(file), rows)
    return file


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


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder with a rubric, and servers that are asked again soon."""
    monkeypatch.chdir(tmp_path)
    Path("rubric.txt").write_text("Good answers are short.")
    monkeypatch.setattr(endpoint, "_FIRST_DELAY", 0.001)
    monkeypatch.setattr(ssl, "create_default_context", _tls_context)


@pytest.fixture(scope="session")
def small_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
    }
    return make_checkpoint(tmp_path_factory.mktemp("models") / "small", "llama", **sizes)


@pytest.fixture
def small_model(small_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that answers in fp32."""
    monkeypatch.setattr("nemo_kto.tools.inference.chat_model.bf16_slowdown", lambda **_: 2.0)
    return small_model_folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", PROMPTS)
