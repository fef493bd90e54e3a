"""A valid run folder that each test damages."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_kto.data.tokens.chat_template import RecordEncoder
from tests.hostile.folders import make_adapter, make_model, write
from tests.unit.data.tiny_data import chatml_tokenizer


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A folder with a model, an adapter and rows that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("whole")
    make_model(folder / "model", tokenizer_folder)
    make_adapter(folder / "adapter", folder / "model")
    write(folder / "rows.jsonl", {"prompt": "p", "response": "r", "preference": "chosen"})
    return folder


@pytest.fixture
def here(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def encoder() -> RecordEncoder:
    return RecordEncoder(tokenizer=chatml_tokenizer())


class Hang(BaseException):
    """Nothing that catches errors of files catches this."""


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """No input may hang; ten seconds on a free machine are up to two minutes on a busy one."""

    def too_long(*_: object) -> None:
        raise Hang(f"{request.node.name} hangs")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
