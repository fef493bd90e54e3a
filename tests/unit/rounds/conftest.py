"""A tiny model, prompts, and answers as `nemo-kto sample` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import make_checkpoint, write_rows

PROMPTS: list[dict[str, Any]] = [{"prompt": "What is a lake?"}, {"messages": [{"role": "user", "content": "And a\nriver?"}]}]
ANSWERS = ("Water.", "A lake is a large body of water.", "Why?", "No idea.")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


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
